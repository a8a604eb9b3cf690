"""One test for many small cases: pytest and its processes take 3 ms for every test, more than such a case does."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def together(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As pytest.mark.parametrize, in one test that goes through all cases; a failure names every case that failed.

    Fixtures are made once for all of them.
    """
    keys, listed = ([names] if isinstance(names, str) else list(names)), list(cases)
    assert listed, "no cases"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def all_cases(**given: Any) -> None:
            failed: list[BaseException] = []
            for case in listed:
                values = dict(zip(keys, [case] if isinstance(names, str) else case, strict=True))
                try:
                    test(**given, **values)
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # all are raised below
                    error.add_note(f"in the case {values}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(listed)} cases", failed)

        kept = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        all_cases.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # for fixtures
        all_cases.__dict__.update(dict.fromkeys(map(str, listed)))  # where -k looks: a case chooses its test
        return all_cases

    return decorate
