"""RMSNorm beside LayerNorm: outputs, operations, bytes and measured time."""

import argparse
import json
from dataclasses import asdict

import torch

from rmsnorm.cli.requirements import DTYPES, positive, shape
from rmsnorm.comparison import compare_normalization


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=shape, default=(1024, 4096), metavar="ROWSxCOLS", help="default 1024x4096")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument("--mean", type=float, default=0.0, help="of the random input, whose deviation is 1 (default 0)")
    parser.add_argument("--rounds", type=positive, default=15, help="rounds of timing (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    rows, dim = arguments.shape
    dtype = getattr(torch, arguments.dtype)
    found = compare_normalization(dim, rows, dtype, mean=arguments.mean, rounds=arguments.rounds)
    print(json.dumps(asdict(found), indent=2) if arguments.json else found)
    return 0
