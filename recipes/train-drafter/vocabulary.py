"""The tokens that the target's answers are made of, as a draft vocabulary for its drafter.

    python vocabulary.py data -o drafter/draft_vocab.json

`dflash-trt draft-vocab` does the same for texts in files.
"""

from __future__ import annotations

import argparse

from command import output_file, positive, run, texts_folder
from origin import Origin
from shards import read_shards
from target import find_target

from dflash_trt.checkpoint import load_tokenizer
from dflash_trt.checkpoint.draft_vocab import write_ids
from dflash_trt.text.frequency import count_ids, most_frequent

# One token in so many: with 8,192 SmolLM2 loses 0.2% of its acceptance length, with 4,096 2%.
SHARE = 6


def main() -> None:
    """Count and write."""
    args = arguments()
    tokenizer = load_tokenizer(find_target(Origin.read(args.data).target))
    size = args.size or max(1, tokenizer.vocab_size // SHARE)
    answers = (text.tokens[text.answer_start :].numpy() for text in read_shards(args.data))
    counts = count_ids(tokenizer, answers)
    found = most_frequent(counts, size, tokenizer.stop_ids)
    write_ids(args.output, found.ids)
    print(
        f"{args.output}: {size:,} of {len(counts):,} tokens, {found.covered:.1%} of the answers'"
        f" {found.num_tokens:,}"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=texts_folder, help="what responses.py wrote")
    parser.add_argument("-o", "--output", type=output_file, required=True)
    parser.add_argument(
        "--size", type=positive, help=f"tokens; default: one in {SHARE} of the vocabulary"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
