"""Put trained drafters into the demo family: weights, config and card, and their hashes.

    python -m scripts.train_demo.bundle_drafters OUT/eagle3 OUT/mtp OUT/p-eagle OUT/pard

What only training needs (its state, curves and metrics) stays behind, and cards name the folder as
the demo that it becomes.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "slipstream" / "demo"
MOST_BYTES = 40 << 20
KEPT = ("config.json", "generation_config.json", "model.safetensors", "README.md")
KEPT_OF_MODELS = ("tokenizer.json", "tokenizer_config.json")


def bundle(source: Path) -> None:
    """Copy what a drafter needs to `demo/NAME`."""
    folder = DEMO / source.name
    folder.mkdir(exist_ok=True)
    for name in (*KEPT, *KEPT_OF_MODELS):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    card = folder / "README.md"
    text = card.read_text("utf-8").partition(" Settings:\n")[0].rstrip() + "\n"
    text = text.replace(str(source), f"demo/{source.name}")
    text = text.replace(str(source.parent), "OUT").replace("--out demo/", "--out OUT/")
    card.write_text(text.replace(" `metrics.jsonl` has the curves.", ""), "utf-8")


def write_hashes() -> None:
    """Write the hashes of all files that ship, except the manifest and the family's card."""
    path = DEMO / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    files = [file for file in sorted(DEMO.glob("*/*")) if "__pycache__" not in file.parts]
    manifest["files"] = {
        str(file.relative_to(DEMO)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }
    path.write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def main() -> None:
    for name in sys.argv[1:]:
        bundle(Path(name).resolve())
    write_hashes()
    size = sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file())
    print(f"{size / 2**20:.2f} MiB of {MOST_BYTES >> 20}")
    if size > MOST_BYTES:
        sys.exit("too large to ship")


if __name__ == "__main__":
    main()
