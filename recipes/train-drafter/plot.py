"""Training's curve as a picture.

python plot.py drafter/curve.json -o curve.svg
"""

from __future__ import annotations

import argparse
import json

import command
import matplotlib.pyplot as plt


def main() -> None:
    """Draw loss and acceptance over anchors seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("curve", type=command.existing_file)
    parser.add_argument("-o", "--output", type=command.output_file, required=True)
    args = parser.parse_args()
    rows = json.loads(args.curve.read_text())
    seen = [row["anchors"] / 1000 for row in rows]
    figure = plt.figure(figsize=(7, 4), layout="constrained")
    left_axis = figure.subplots()
    right_axis = left_axis.twinx()
    lines = [
        *left_axis.plot(seen, [row["loss"] for row in rows], "C7", label="training loss (left)"),
        *right_axis.plot(seen, [row["acceptance_length"] for row in rows], "C0",
                         label="acceptance length, held-out texts"),
        *right_axis.plot(seen, [row["at_width_4"] for row in rows], "C1",
                         label="the same at verify width 4"),
    ]  # fmt: skip
    left_axis.set(xlabel="anchors seen, thousands", ylabel="loss")
    right_axis.set(ylabel="tokens a step")
    figure.legend(handles=lines, loc="outside lower center", ncols=3, fontsize="small")
    plt.savefig(args.output)


if __name__ == "__main__":
    command.run(main)
