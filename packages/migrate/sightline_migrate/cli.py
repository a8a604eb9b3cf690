"""`sightline migrate [options] script.py args`, `... -m module args`, `... torchrun ...`; `report`, `scan` and `rules`.

--help does not import torch. Arguments after the script are passed to it unchanged.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import os
import runpy
import shutil
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from sightline_migrate import terminal
from sightline_migrate.options import PREFIX, MigrateError, MigrateOptions, command

USAGE = """{0} [options] script.py [args ...]
       {0} [options] -m module [args ...]
       {0} [options] torchrun --nproc-per-node 2 train.py [args ...]
       {0} report DIR [--json] [--all]
       {0} scan FILE_OR_FOLDER ... [--advise] [--json] [--strict] [--syncs]
       {0} rules [NAME] [--json] [--markdown]"""
COMMANDS = {
    "report": "sightline_migrate.reporting.report",
    "scan": "sightline_migrate.reporting.scan",
    "rules": "sightline_migrate.reporting.listing",
}
"""each has main(arguments) -> exit code; imported when used, since --help must not import torch"""
LOG_FLAGS = {"log": "--log-level", "log_dir": "--log"}
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def parser() -> argparse.ArgumentParser:
    """Build the parser: one flag per field of MigrateOptions."""
    what = "run an unmodified CUDA script on the available device"
    made = argparse.ArgumentParser(command(), usage=USAGE.format(command()), description=what, allow_abbrev=False)
    lines = _help_of_fields()
    for field in fields(MigrateOptions):
        flag = LOG_FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
        text = lines[field.name]
        if isinstance(field.default, bool):
            made.add_argument(
                flag, dest=field.name, action=argparse.BooleanOptionalAction, default=None, help=f"{text} (off)"
            )
        else:
            kind = type(field.default)
            default = 1 if field.name == "log" else field.default
            shown = f"{text} ({default})" if default != "" else text
            metavar = "DIR" if field.name == "log_dir" else "N" if kind is int else "X"
            made.add_argument(flag, dest=field.name, type=kind, default=None, help=shown, metavar=metavar)
    made.add_argument("-m", metavar="module", help="run a module, as `python -m` does; the rest goes to the module")
    return made


def _help_of_fields() -> dict[str, str]:
    """Return the string under each field."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(MigrateOptions)).body[0].body  # type: ignore[attr-defined]
    named = [(at, ast.unparse(node.target)) for at, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    return {name: ast.literal_eval(body[at + 1].value) for at, name in named}


def split(argv: Sequence[str]) -> tuple[list[str], str, str, list[str]]:
    """Split into (our flags, module, script, its arguments); everything after the script belongs to the script."""
    takes_value = {
        LOG_FLAGS.get(f.name, "--" + f.name.replace("_", "-"))
        for f in fields(MigrateOptions)
        if not isinstance(f.default, bool)
    }
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "-m":
            return list(argv[:at]), argv[at + 1] if at + 1 < len(argv) else "", "", list(argv[at + 2 :])
        if word == "--" and at + 1 < len(argv):
            return list(argv[:at]), "", argv[at + 1], list(argv[at + 2 :])
        if not word.startswith("-"):
            return list(argv[:at]), "", word, list(argv[at + 1 :])
        at += 2 if word in takes_value else 1
    return list(argv), "", "", []


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code; a script's own exit code or signal ends the process directly."""
    try:
        if argv and argv[0] in COMMANDS:
            terminal.guard()
            with _current_folder_not_searched():
                code: int = importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
            return code
        flags, module, script, args = split(argv)
        arguments = parser().parse_args(flags)
        if not module and not script:
            raise MigrateError(f"nothing to run; write e.g. `{command()} train.py --device cuda`")
        options = _options(arguments)
        if module in TORCHRUN or (script and not module and not os.path.exists(script)):
            with _current_folder_not_searched():
                _launch(options, module, script, args)
        _check(module, script)
        with _current_folder_not_searched():
            _activate(options)
    except MigrateError as error:
        terminal.say(f"error: {error}", "stderr")
        return error.exit_code
    run(module, script, args)
    return 0


@contextlib.contextmanager
def _current_folder_not_searched() -> Iterator[None]:
    """Import torch without the folder that `python -m` searches first: a script's cuda.py is not the package cuda."""
    first = sys.path[0]
    if sys.flags.safe_path or os.path.abspath(first) != os.getcwd():
        yield
        return
    sys.path.pop(0)
    try:
        yield
    finally:
        sys.path.insert(0, first)


def _options(arguments: argparse.Namespace) -> MigrateOptions:
    given = {f.name: v for f in fields(MigrateOptions) if (v := getattr(arguments, f.name)) is not None}
    if "log" not in given and not os.environ.get(PREFIX + "LOG"):
        given["log"] = 1  # the command logs by default
    return MigrateOptions.from_keywords(**given)


def _activate(options: MigrateOptions) -> None:
    # Registered first, so that it runs last: after the report and after the script's own exit functions.
    atexit.register(_end_by_signal)
    if util := sys.modules.get("multiprocessing.util"):  # it closes the log: registered before, it would come too late
        atexit.unregister(util._exit_function)
        atexit.register(util._exit_function)
    from sightline_migrate import session

    session.activate_and_announce(options)


def _launch(options: MigrateOptions, module: str, script: str, args: Sequence[str]) -> NoReturn:
    """Become torchrun, or another command that starts Python; the environment migrates its child processes."""
    if module or script == "torchrun":
        # With this interpreter: the torchrun on PATH may belong to another one.
        words = [sys.executable, "-m", module or TORCHRUN[0], *args]
    else:
        found = shutil.which(script)
        if found is None or script.endswith(".py"):
            raise MigrateError(
                f"{script!r} is neither a file nor a command on PATH; give a script, -m module or torchrun"
            )
        words = [found, *args]
    if os.environ.get(AUTOLOAD_SWITCH) == "0":
        raise MigrateError(
            f"{AUTOLOAD_SWITCH}=0 keeps child processes of {words[-len(args) - 1]} from being migrated; unset it"
        )
    from sightline_migrate import session
    from sightline_migrate.reporting import logfile

    logfile.becomes_launcher = True
    session.activate_and_announce(options)
    sys.stdout.flush()
    os.execv(words[0], words)


def _check(module: str, script: str) -> None:
    if module:
        sys.path[0:1] = [os.getcwd()] if not sys.flags.safe_path else sys.path[0:1]
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError) as error:
            raise MigrateError(f"-m {module}: {error}") from error
        if found is None:
            raise MigrateError(f"-m {module}: no such module; to run a file, omit -m")


def run(module: str, script: str, args: Sequence[str]) -> None:
    """Run as `python script.py args` or `python -m module args` would, with the same traceback and exit on errors."""
    sys.argv = [script or module, *args]
    try:
        if module:
            _new_main()
            # The interpreter's own function for -m; runpy.run_module would remove `__main__` at the end.
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        else:
            # With -P and -I the script's folder is not searched.
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(script))
            _run_file(script)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001
        _print_traceback(error)
        if isinstance(error, KeyboardInterrupt):
            _pending.append(signal.SIGINT)
        raise SystemExit(1) from None


def _run_file(script: str) -> None:
    """Execute a file as `__main__`.

    runpy.run_path would change sys.argv[0] or leave __file__ relative, and remove `__main__` at the end.
    """
    path = os.path.abspath(script)
    if os.path.isdir(path) or not _is_source(path):
        runpy.run_path(script, run_name="__main__")  # a folder or an archive with a __main__.py, compiled code
        return
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names = _new_main()
    names.update(__file__=path, __loader__=loader, __cached__=None)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


def _new_main() -> dict[str, Any]:
    sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    names["__builtins__"] = builtins
    return names


def _is_source(path: str) -> bool:
    with open(path, "rb") as file:
        start = file.read(4)
    return start[:2] != b"PK" and start != importlib.util.MAGIC_NUMBER


def _print_traceback(error: BaseException) -> None:
    """Print the traceback as the interpreter does, without the frames that ran the script."""
    trace = error.__traceback__
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.stdout.flush()
    sys.excepthook(type(error), error, trace)


_pending: list[signal.Signals] = []


def _end_by_signal() -> None:
    """End by the signal, as an interrupted interpreter does, so that the shell and the launcher see it."""
    for number in _pending:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
