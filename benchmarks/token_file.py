"""Token ids for gemma_fp16.py, from a checkpoint's tokenizer and a text that comes with Python: its language reference.

    python benchmarks/token_file.py --checkpoint DIR --out FILE

Each sequence begins with BOS and goes on in the text where the one before ended. Make the file with the
transformers release that the figures are compared in: the GGUF tokenizers of older ones add no BOS.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from transformers import AutoTokenizer

BOS = 2


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="directory with the tokenizer")
    parser.add_argument("--out", required=True, help="JSON: a list of lists of ids")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="in a sequence, BOS included")
    args = parser.parse_args()

    tokenizer: Any = AutoTokenizer.from_pretrained(args.checkpoint)
    words = "\n\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = tokenizer(words, add_special_tokens=False)["input_ids"]
    step = args.tokens - 1
    sequences = [[BOS, *ids[i * step : (i + 1) * step]] for i in range(args.sequences)]
    if len(sequences[-1]) < args.tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, too few for {args.sequences} sequences of {args.tokens}")
    Path(args.out).write_text(json.dumps(sequences) + "\n")
    print(f"{len(sequences)} sequences of {args.tokens} tokens")


if __name__ == "__main__":
    main()
