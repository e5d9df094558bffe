"""guidellm's benchmark with synthetic prompts, which it counts with the model's tokenizer."""

import os
import subprocess
import sys
from importlib.resources import files

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")
TOKENIZER = os.environ.get("SLIPSTREAM_TOKENIZER", str(files("slipstream.demo") / "target"))

settings = {
    "--backend": f"kind=openai_http,target={URL},model={MODEL}",
    "--profile": "kind=concurrent,streams=2",
    "--constraint": "kind=max_requests,count=8",
    "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
    "--data": "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
    "--output": "kind=console",
}
flags = [word for pair in settings.items() for word in pair]
command = [sys.executable, "-m", "guidellm", "run", *flags, "--disable-progress"]
ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(ran.stdout)
if ran.returncode or " successful=8 errored=0 " not in ran.stdout:
    raise SystemExit("not all requests succeeded")
