"""The tables of image classifiers: quality, out-of-distribution inputs, shifts, segmentation.

    python -m benchmarks.images mnist --device cuda      # fully connected, three seeds
    python -m benchmarks.images ood --device cuda        # MNIST, Fashion-MNIST: quality, other sets
    python -m benchmarks.images cifar --device cuda      # CIFAR-10 subset: quality, corruptions
    python -m benchmarks.images cifar-frn --device cuda  # with filter response normalisation
    python -m benchmarks.images reference --device cuda  # 2,000 images: distance to chains
    python -m benchmarks.images camvid --device cuda     # segmentation: epistemic map
        [--data FOLDER] [--sets A,B] [--methods A,B] [--out benchmarks/results] [--jobs 2]
        [--seed 0] [--show]

Data come from --data or DOXA_DATA (`mnist.npz`, `camvid.npz`, …). The command works as `doxa bench`
does: cells are added to OUT/TABLE.jsonl as soon as they are known, what is known is not computed
again, and OUT/TABLE.md and its figures are written at the end. The settings of each table are in
`image_data.py` and `scenes.py`, those of each method in `image_methods.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.image_tables import CIFAR, CIFAR_FRN, MNIST, OOD, REFERENCE, ImageTable
from benchmarks.scenes import CAMVID
from doxa.app.commands.bench import run_table
from doxa.app.commands.terminal import log_to_terminal

TABLES: dict[str, ImageTable] = {
    table.name: table for table in (MNIST, OOD, CIFAR, CIFAR_FRN, REFERENCE, CAMVID)
}
RESULTS = Path(__file__).parent / "results"


def names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--data", type=Path, help="the folder of data sets; default: DOXA_DATA")
    parser.add_argument("--sets", type=names, help="data sets, separated by commas")
    parser.add_argument("--methods", type=names, help="methods, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of results")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--device", help="such as cuda; default: cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="only show what is known")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    log_to_terminal(args.verbose)
    table = TABLES[args.table]
    tasks = table.tasks(args.data, args.sets, args.methods, args.device, args.seed)
    run_table(table, None if args.show else tasks, args.out, args.jobs)


if __name__ == "__main__":
    main()
