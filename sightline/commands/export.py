"""`sightline export`: one file of a network."""

from __future__ import annotations

from collections.abc import Sequence

from sightline.commands.words import add_checkpoint, own_flags, parser_of, refuse_flags_of_run, refuse_value_of_flag


def export(flags: Sequence[str]) -> None:
    """Write a run's network into one file and compare it: `sightline export runs/resnet50 --format onnx`"""
    parser = parser_of("export", export)
    parser.add_argument("run", metavar="RUN", help="run folder, or a ckpt-* folder")
    parser.add_argument("--format", default="onnx", help="onnx, torch-export, safetensors or pth; default: onnx")
    parser.add_argument("--out", default="", help="the file; default: RUN/model.onnx, .pt2, .safetensors or .pth")
    what = "detectors: outputs of the network, without decoding of boxes and NMS; default file: RUN/model-raw.onnx"
    parser.add_argument("--raw", action="store_true", help=what)
    add_checkpoint(parser)
    arguments, rest = parser.parse_known_args(flags)
    refuse_value_of_flag(flags, arguments.run, "export RUN")
    refuse_flags_of_run("export", arguments, rest, own_flags(parser))
    from sightline.export import run

    options = run.ExportOptions(arguments.format, arguments.out, arguments.raw)
    run.export(arguments.run, options, rest, arguments.checkpoint, arguments.recipe, print)
