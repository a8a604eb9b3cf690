"""`sightline migrate rules [NAME]`: every name with a rule, its class and its effect;
docs/reference/migration_rules.md.

Reads the table of rules that the run and the scan use, so that the three cannot disagree.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence

from sightline_migrate import terminal
from sightline_migrate.options import MigrateError, command
from sightline_migrate.reporting import report
from sightline_migrate.rules import cuda
from sightline_migrate.rules.table import TORCH_VERSION, Rule, all_rules
from sightline_migrate.stand_ins import finder

FORMAT = 1
WIDTH = 120
PAGE = "torch.cuda"
COMMAND = "sightline migrate rules --markdown"
UNCHANGED = "works without a CUDA device"


def main(argv: Sequence[str]) -> int:
    """Run the command `rules`."""
    what = "list the names that migration replaces, their class and their effect"
    parser = argparse.ArgumentParser(f"{command()} rules", description=what, allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="part of a name, e.g. cuda.Stream; all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--markdown", action="store_true", help=f"print the page of {PAGE}: docs/reference/migration_rules.md"
    )
    arguments = parser.parse_args(argv)
    rules = known_rules()
    if arguments.markdown:
        terminal.say(page(rules))
        return 0
    found = [rule for rule in rules if arguments.name.lower() in shown_name(rule).lower()]
    if not found:
        raise MigrateError(
            f"no rule for {arguments.name!r}: a name of {PAGE} without a rule is refused, other names of torch are "
            f"not replaced; `{command()} rules` lists all"
        )
    if arguments.json:
        entries = [{"name": shown_name(r), "class": r.kind, "what": r.what, "targets": list(r.targets)} for r in found]
        terminal.say(json.dumps({"format": FORMAT, "rules": entries}, indent=1))
    else:
        terminal.say("\n".join(_line(rule) for rule in found))
    return 0


def known_rules() -> list[Rule]:
    """Return the rules of torch and of the stand-ins, installed or not, by name; and names that need none."""
    of_torch = [rule for rule in all_rules() if rule.name.startswith(("torch.", "triton."))]
    of_packages = [rule for package in finder.PACKAGES.values() for rule in package.rules()]
    unchanged = [Rule(name, "exact", lambda rule, original, session: original, UNCHANGED) for name in cuda.LEFT_ALONE]
    return sorted(
        (*of_torch, *of_packages, *unchanged),
        key=lambda rule: (shown_name(rule).lower(), shown_name(rule), rule.targets),
    )


def shown_name(rule: Rule) -> str:
    return rule.name.removesuffix(".__init__").removesuffix(".__new__").removesuffix(".__call__")


def _line(rule: Rule) -> str:
    return f"{shown_name(rule)}  {rule.kind}: {rule.what}{_targets(rule)}"


def _targets(rule: Rule) -> str:
    return f" (target {', '.join(rule.targets)})" if rule.targets else ""


def page(rules: Sequence[Rule]) -> str:
    """Return the page of all names of torch.cuda: grouped by class and effect, since many share one."""
    lines = [
        f"# Every name of {PAGE}",
        "",
        f"Written by `{COMMAND}` for torch {TORCH_VERSION[0]}.{TORCH_VERSION[1]}; `sightline migrate rules NAME` finds",
        "one name, also outside of torch.cuda. Names stand without `torch.cuda.`; the classes are explained in",
        "[migration_reference.md](migration_reference.md). `amp` is `torch.amp`; other names are refused.",
    ]
    for kind in report.KINDS:
        groups: dict[str, list[str]] = {}
        for rule in rules:
            if rule.kind == kind and rule.name.startswith(PAGE + "."):
                name = shown_name(rule).removeprefix(PAGE + ".")
                groups.setdefault(f"{rule.what}{_targets(rule)}", []).append(f"`{name}`")
        if groups:
            lines += ["", f"## {kind}: {report.MEANING[kind]}"]
        for what, names in groups.items():
            text = f"- {what}: {', '.join(names)}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)
