"""Charts of a report as SVG: lines over steps and epochs. Colours are those of the page's style, light or dark."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from sightline.report.html import text

Range = tuple[float, float]
Points = Sequence[tuple[float, float]]  # x and y; a y that is not finite breaks the line

WIDTH, HEIGHT = 640, 240
LINE = 22  # height of a second line of numbers below the chart
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 30
MOST_POINTS = 400  # of one line; more are averaged
DOTS = 40  # points of a line up to which each has a dot that tells its value
COLOURS = 8  # of the page's style: --c0 to --c7
_LOG_FROM = 300.0  # ratio of the largest to the smallest value from which the axis is logarithmic


def line_chart(
    series: Mapping[str, Points],
    x_name: str = "step",
    x_range: Range | None = None,
    y_range: Range | None = None,
    looks: Mapping[str, tuple[int, str]] | None = None,
    epochs: Points = (),
) -> str:
    """Draw lines by name; "" if none has a finite point. Without ranges the axes fit the points; `looks` are numbers of
    colours and classes of the style, without them every line has its own colour. `epochs` are steps at which an epoch
    ends, and its number: a second line of numbers below the steps."""
    lines = {name: _thinned(points) for name, points in series.items() if points}
    values = [y for points in lines.values() for _, y in points if math.isfinite(y)]
    if not values:
        return ""
    xs = [x for points in lines.values() for x, _ in points]
    x_axis = _Axis(*(x_range or (min(xs), max(xs))), LEFT, WIDTH - RIGHT)
    y_axis = _Axis(*y_range, HEIGHT - BOTTOM, TOP) if y_range else _y_axis(values)
    height = HEIGHT + LINE * bool(epochs)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{text(", ".join(lines))}">']
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    ticks = [(x_axis.place(tick), tick) for tick in x_axis.ticks() if x_name != "step" or not tick % 1]
    parts.append(_numbers(ticks, x_name, HEIGHT - 10))
    epoch_of = _line_through(epochs) if epochs else None
    if epoch_of:
        step_of = _line_through([(epoch, step) for step, epoch in epochs])
        among = _Axis(epoch_of(x_axis.low), epoch_of(x_axis.high), LEFT, WIDTH - RIGHT).ticks()
        ticks = [(x_axis.place(step_of(tick)), tick) for tick in among if not tick % 1]
        parts.append(_numbers(ticks, "epoch", height - 10))
    looks = {name: looks[name] if looks else (number, "") for number, name in enumerate(lines)}
    for name, points in lines.items():
        number, kind = looks[name]
        colour = f"var(--c{number % COLOURS})"
        has_dots = len(points) <= DOTS and not y_range
        for stretch in _unbroken(points):
            placed = [(f"{x_axis.place(x):.1f}", f"{y_axis.place(y):.1f}") for x, y in stretch]
            if len(stretch) > 1:
                line = " ".join(map(",".join, placed))
                parts.append(f'<polyline points="{line}" stroke="{colour}" class="{kind}"/>')
            for (x, y), (cx, cy) in zip(stretch, placed, strict=True) if has_dots or len(stretch) == 1 else ():
                epoch = f", epoch {short(epoch_of(x))}" if epoch_of else ""
                said = f"<title>{text(x_name)} {short(x)}{epoch}: {y:.4g}</title>"
                parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}">{said}</circle>')
    return "".join([*parts, "</svg>", _legend(looks) if len(lines) > 1 else ""])


def _numbers(ticks: Sequence[tuple[float, float]], name: str, y: int) -> str:
    """Write numbers below a chart, and the name of their axis at the right, where no number stands."""
    room = WIDTH - RIGHT - 12 - 7 * len(name)
    shown = [f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{short(tick)}</text>' for x, tick in ticks if x <= room]
    return "".join([*shown, f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end" class="dim">{text(name)}</text>'])


def _line_through(points: Points) -> Callable[[float], float]:
    """Return the line through the origin and these points, which rise; its last stretch goes on."""
    known = [(0.0, 0.0), *points]

    def at(x: float) -> float:
        place = min(bisect.bisect_right(known, (x, math.inf)), len(known) - 1)
        (x0, y0), (x1, y1) = known[place - 1], known[place]
        return y0 + (x - x0) / (x1 - x0) * (y1 - y0)

    return at


def short(value: float) -> str:
    """Format a number in a few letters: 1.5k, 0.02, 3e-05."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}"


class _Axis:
    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool = False):
        self.is_log = is_log
        self.low, self.high = (math.log10(low), math.log10(high)) if is_log else (low, high)
        if self.high - self.low < 1e-12 * max(1.0, abs(self.high)):  # one value only: in the middle
            room = (abs(self.low) or 1) * 0.1
            self.low, self.high = self.low - (room if self.low else 0), self.high + room
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        """Return where a value lies in the image."""
        at = math.log10(value) if self.is_log else value
        return self.start + (at - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about five round numbers within the axis."""
        if self.is_log:
            every = max(1, math.ceil((self.high - self.low) / 5))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, every)]
        rough = (self.high - self.low) / 5
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def _y_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    # The tenth of the values that is lowest does not decide: a rate that falls to 0 is drawn as a person thinks of it.
    is_log = low > 0 and high / sorted(values)[len(values) // 10] > _LOG_FROM
    if not is_log:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    return _Axis(low, high, HEIGHT - BOTTOM, TOP, is_log)


def _thinned(points: Points) -> list[tuple[float, float]]:
    """Average neighbours until there are few enough; one that is not finite stays visible as a gap."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _unbroken(points: Points) -> list[list[tuple[float, float]]]:
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _legend(looks: Mapping[str, tuple[int, str]]) -> str:
    items = (
        f'<span><i class="{kind}" style="background:var(--c{number % COLOURS})"></i>{text(name)}</span>'
        for name, (number, kind) in looks.items()
    )
    return f'<p class="legend">{"".join(items)}</p>'
