"""Lines that wait for the device, counted by the user's own line; nothing is touched unless asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch

import sightline_migrate as migrate
from sightline_migrate.reporting import syncs


@pytest.fixture
def watched() -> Iterator[None]:
    syncs.counts.clear()
    with migrate.migrate(target="cpu", syncs=True):
        yield
    syncs.counts.clear()


def found() -> dict[str, int]:
    return {site["what"]: site["count"] for site in syncs.sites()}


@pytest.mark.usefixtures("watched")
def test_each_way_to_wait_counts_once(capsys: pytest.CaptureFixture[str]):
    np = pytest.importorskip("numpy")
    x = torch.ones(2, device="cuda")
    one = x.sum()
    assert one.item() == float(one) == int(one) == 2 and bool(one)
    assert x.cpu().tolist() == [1, 1]
    assert x.numpy().sum() == np.asarray(x).sum() == 2
    assert [10, 11, 12][one.long()] == 12
    print(x, f"{one:.1f}")
    torch.cuda.synchronize()
    assert capsys.readouterr().out == "tensor([1., 1.]) 2.0\n"
    assert found() == {
        ".item()": 1,
        "float(tensor)": 1,
        "int(tensor)": 1,
        "bool(tensor)": 1,
        ".cpu()": 1,
        ".tolist()": 1,
        ".numpy()": 1,
        "numpy.asarray(tensor)": 1,
        "tensor as an index": 1,
        "print(tensor)": 2,
        "torch.cuda.synchronize()": 1,
    }


@pytest.mark.usefixtures("watched")
def test_a_loop_is_one_line_with_a_count():
    total = 0.0
    for step in range(5):
        total += torch.full((), float(step), device="cuda").item()  # the line
    (site,) = syncs.sites()
    assert total == 10 and (site["count"], site["file"]) == (5, __file__)
    assert site["source"].endswith("# the line")


@pytest.mark.usefixtures("watched")
def test_what_torch_reads_on_the_host_is_no_wait():
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.Adam([weight])
    for _ in range(2):
        weight.grad = torch.ones(2, device="cuda")
        optimizer.step()  # its step counts lie on the host
    assert found() == {}


def test_nothing_is_replaced_unless_asked():
    before = {name: inspect.getattr_static(torch.Tensor, name) for name in ("item", "__bool__", "__repr__", "tolist")}
    with migrate.migrate(target="cpu"):
        now = {name: inspect.getattr_static(torch.Tensor, name) for name in before}
        assert all(now[name] is before[name] for name in before)
    with migrate.migrate(target="cpu", syncs=True):
        assert inspect.getattr_static(torch.Tensor, "item") is not before["item"]
    assert all(inspect.getattr_static(torch.Tensor, name) is before[name] for name in before)
    assert "item" not in vars(torch.Tensor)  # inherited again
