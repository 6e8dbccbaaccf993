"""`ray-ckpt export`: the weights of a checkpoint as safetensors. Needs torch, and no Ray."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ray_ckpt.checkpoint.listing import list_checkpoints
from ray_ckpt.commands.output import print_json
from ray_ckpt.view.human import human_bytes, human_count
from ray_ckpt.view.runs import find_run, pick
from ray_ckpt.view.tables import printable

_FILE_MIB = 1024


def add_arguments(parser: argparse.ArgumentParser, step_help: str) -> None:
    """The options of the command."""
    parser.add_argument("step", metavar="STEP", help=step_help)
    parser.add_argument("--to", metavar="DIR", required=True, help="folder, empty or new")
    parser.add_argument(
        "--what", choices=("model", "ema"), default="model", help="which weights (default: model)"
    )
    parser.add_argument(
        "--file-mib",
        type=int,
        default=_FILE_MIB,
        metavar="MIB",
        help=f"greatest size of a file (default: {_FILE_MIB}); the command takes about twice that memory",
    )


def command_export(args: argparse.Namespace) -> int:
    """`export RUN STEP --to DIR`: verifies a checkpoint and writes its weights."""
    entry = pick(list_checkpoints(find_run(args.run, args.storage)), args.step)
    from ray_ckpt.checkpoint.export import export_weights  # torch takes seconds: after the checks

    to = Path(args.to).expanduser()
    done = export_weights(entry, to, what=args.what, file_bytes=args.file_mib << 20)
    if args.json:
        print_json(asdict(done))
        return 0
    for name, reason in done.left_out.items():
        print(f"left out {printable(name)}: {reason}")
    print(
        f"{entry.folder.name}: {done.tensors} tensors of the {done.what}, {human_count(done.parameters)} elements, "
        f"{human_bytes(done.bytes)} in {len(done.files)} files in {printable(done.folder)}"
    )
    return 0
