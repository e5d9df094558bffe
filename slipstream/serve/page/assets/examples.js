// Prompts to begin with; the bundled demo speaks little but Python.

export const EXAMPLES = {
  completion: [
    'class Cache:\n    """A dictionary that forgets what was used least recently.\n\n    Args:\n        capacity: the most entries it keeps.\n    """\n\n    def __init__(self, capacity):\n',
    'import json\nfrom pathlib import Path\n\n\ndef load_config(path):\n    """Read a JSON file and return its settings."""\n',
    'import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description="Count the words of a file.")\n',
  ],
  chat: [
    "Write a Python function `read_lines(path)` that returns the lines of a text file without their line ends.",
    "Write the Python function `flatten`.\n\nTurn a list of lists into one list, in order.",
    "Please write a Python class `Timer` that can be used in a with statement.",
  ],
};
