"""`sightline migrate [options] script.py args`, `... -m module args`; --help needs no torch."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import fields

from sightline.migrate.options import MigrateError, Options


def parser() -> argparse.ArgumentParser:
    """One flag per field of Options, with the same name."""
    what = "run an unmodified CUDA script on the device that is there"
    made = argparse.ArgumentParser("sightline migrate", description=what, allow_abbrev=False)
    lines = _help_of_fields()
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            made.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=lines[field.name])
        else:
            made.add_argument(flag, type=type(field.default), default=None, help=lines[field.name])
    made.add_argument("-m", dest="module", action="store_true", help="what follows is a module, not a file")
    made.add_argument("script", help="script.py, or a module name with -m")
    made.add_argument("args", nargs=argparse.REMAINDER, help="handed to the script")
    return made


def _help_of_fields() -> dict[str, str]:
    """The string under each field."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(Options)).body[0].body  # type: ignore[attr-defined]
    named = [(at, ast.unparse(node.target)) for at, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    return {name: ast.literal_eval(body[at + 1].value) for at, name in named}


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    given = {f.name: v for f in fields(Options) if (v := getattr(arguments, f.name)) is not None}
    try:
        options = Options.of(**given)
        from sightline.migrate import session

        session.activate(options)
    except MigrateError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    run(arguments.script, arguments.args, arguments.module)
    return 0


def run(script: str, args: Sequence[str], is_module: bool) -> None:
    """As `python script.py args` or `python -m module args` would."""
    sys.argv = [script, *args]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
