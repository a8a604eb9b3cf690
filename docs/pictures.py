"""Make the pictures of the documents: `python docs/pictures.py FOLDER`, about a quarter of an hour on two cores.

It draws data, trains the three demos into FOLDER (runs that are finished are used as they are), and takes the pictures
from what they leave. Needs Chromium for pages and pyte for the terminal: `pip install pyte`.
"""

from __future__ import annotations

import html
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

REPO = Path(__file__).resolve().parents[1]
IMAGES = REPO / "docs" / "images"
COLUMNS, ROWS = 92, 22
RUNS = {
    "run": "train demo_classification --data.path shapes/classification",
    "segmentation": "train demo_segmentation --data.path slices",
    "detection": "train demo_detection --data.path images/detection",
}
PREPARED = {
    "shapes": "prepare shapes --out shapes",
    "volumes": "prepare shapes --out volumes --only segmentation --train-volumes 60",
    "slices": "prepare decathlon --source volumes/segmentation --out slices",
    "images": "prepare shapes --out images --only detection --train-pictures 4000",
}


def sightline(words: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "sightline", *words.split()], cwd=folder, check=True, env=environment())


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "COLUMNS": str(COLUMNS),
        "LINES": str(ROWS),
        "TERM": "xterm-256color",
    }


def kept(image: Image.Image, name: str, width: int = 860, colours: int = 128) -> None:
    """Write a picture that is small enough to load at once."""
    scaled = image.convert("RGB").resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    path = IMAGES / name
    scaled.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{name}: {scaled.width} x {scaled.height}, {path.stat().st_size // 1024} kB")


def page(text: str, width: int, height: int) -> Image.Image:
    """Return what Chromium shows of a page."""
    with tempfile.TemporaryDirectory() as folder:
        file, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        file.write_text(text, encoding="utf-8")
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if not chromium:
            sys.exit("pictures of pages need Chromium (Debian: apt install chromium)")
        words = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=2"]
        words += [f"--window-size={width},{height}", f"--screenshot={shot}", file.as_uri()]
        subprocess.run([chromium, *words], check=True, capture_output=True)
        return Image.open(shot).convert("RGB")


def report(folder: Path) -> None:
    """The head of the page, the first curves, and the worst predictions below them."""
    text = (folder / "run" / "report.html").read_text("utf-8").replace(f"{folder}/", "")
    style = "<style>#curves .charts > :nth-child(n+3) {display: none}</style>"
    kept(page(text.replace("</head>", f"{style}</head>"), 900, 1040), "report.png", 900)


def show(folder: Path) -> None:
    sightline("show demo_classification --data.path shapes/classification --out show.png", folder)
    sheet = Image.open(folder / "show.png")
    kept(sheet.crop((0, 0, sheet.width, round(sheet.height * 0.755))), "show.png", 760)


def detection(folder: Path) -> None:
    """Three validation images with most boxes, with what was found."""
    shutil.rmtree(folder / "boxes", ignore_errors=True)
    sightline("predict detection images/detection/val2017 --out boxes --score-threshold 0.5 --run.device cpu", folder)
    files = json.loads((folder / "boxes" / "predictions.json").read_text("utf-8"))["files"]
    files.sort(key=lambda each: (min(len(each["found"]), 4), min((box["score"] for box in each["found"]), default=0)))
    tiles = [Image.open(folder / "boxes" / Path(each["path"]).name).convert("RGB") for each in files[-3:]]
    height = min(tile.height for tile in tiles)
    tiles = [tile.resize((tile.width * height // tile.height, height), Image.Resampling.LANCZOS) for tile in tiles]
    sheet = Image.new("RGB", (sum(tile.width for tile in tiles) + 20, height), "white")
    left = 0
    for tile in tiles:
        sheet.paste(tile, (left, 0))
        left += tile.width + 10
    kept(sheet, "detection.png", 760)


def mask(folder: Path) -> None:
    shutil.rmtree(folder / "masks", ignore_errors=True)
    sightline("predict segmentation volumes/segmentation/Task01_Shapes/imagesTs --out masks --run.device cpu", folder)
    kept(Image.open(sorted((folder / "masks").glob("*.png"))[0]), "mask.png", 760)


def terminal(folder: Path) -> None:
    """A training, in its third epoch, as a terminal shows it."""
    import pyte

    shutil.rmtree(folder / "stopped", ignore_errors=True)
    shown = "sightline train demo_classification --data shapes/classification --model.width 8 --epochs 5 --out stopped"
    words = [sys.executable, "-m", *shown.split()]
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {shown}\r\n".encode())
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execve(sys.executable, words, environment())
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    has_stopped = False
    while True:
        try:
            stream.feed(os.read(terminal, 4096))
        except OSError:
            break
        if not has_stopped and any(re.search(r"epoch 3/5 .* 1[4-6]\d/310", line) for line in screen.display):
            kept(page(as_page(screen), 840, 300), "terminal.png", 840, 64)
            os.write(terminal, b"\x03")
            has_stopped = True
    os.waitpid(child, 0)


def as_page(screen: object) -> str:
    """Return a terminal's screen as a page."""
    palette = {"default": "#d6d8dd", "green": "#5fbf77", "red": "#f07067", "brown": "#d9a441", "yellow": "#d9a441"}
    palette |= {"blue": "#6ea8fe", "cyan": "#56b6c2", "magenta": "#c792ea", "white": "#ffffff", "black": "#5c6370"}
    lines = []
    for row in range(ROWS):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]  # type: ignore[attr-defined]
        line = ""
        for cell in cells:
            colour = palette.get(cell.fg, f"#{cell.fg}")
            weight = ";font-weight:bold" if cell.bold else ""
            line += f'<span style="color:{colour}{weight}">{html.escape(cell.data)}</span>'
        lines.append(line)
    while lines and not re.sub(r"<[^>]+>", "", lines[-1]).strip():
        lines.pop()
    return (
        "<body style='margin:0;background:#1e1f24'><pre style='margin:16px;font:14px/1.45 DejaVu Sans Mono,monospace'>"
        + "\n".join(lines)
        + "</pre></body>"
    )


# Bands of the drawing, from the front door down to files: what they are for, and rooms of docs/why/architecture.md.
BANDS = (
    ("what you type", ("cli", "commands", "api", "migrate legacy")),
    ("what you get", ("report", "overview", "export", "inference", "drawing", "measure")),
    ("recipes", ("recipes", "config")),
    ("a run at work", ("train", "engine", "runs", "results")),
    ("what is learnt", ("evaluate tasks", "metrics", "data models", "kernels", "light")),
    ("settings", ("recipe",)),
    ("ground", ("hardware", "files", "terminal", "plugins", "errors safe_path boxes")),
)


def architecture() -> None:
    """One drawing of the rooms in their order."""
    text = (REPO / "docs" / "why" / "architecture.md").read_text("utf-8")
    levels = re.findall(r"^```levels\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0].split("\n")[:-1]
    drawn = [room for _, rooms in BANDS for room in rooms]
    assert sorted(drawn) == sorted(levels), f"BANDS differ from the levels: {set(drawn) ^ set(levels)}"
    heights = [levels.index(room) for _, rooms in reversed(BANDS) for room in sorted(rooms, key=levels.index)]
    assert heights == sorted(heights), "a band holds a room that stands below one of the next band"
    width, band, left = 860, 54, 150
    parts = []
    for place, (name, rooms) in enumerate(BANDS):
        top = 16 + place * (band + 12)
        parts.append(f'<rect class="band" x="8" y="{top}" width="{width - 60}" height="{band}" rx="8"/>')
        parts.append(f'<text class="name" x="24" y="{top + band / 2 + 5}">{name}</text>')
        room = (width - 60 - left - 12) / len(rooms)
        for number, title in enumerate(rooms):
            x = left + number * room
            parts.append(
                f'<rect class="room" x="{x:.0f}" y="{top + 8}" width="{room - 10:.0f}" height="{band - 16}" rx="5"/>'
            )
            names = title.split()
            for line, word in enumerate(names):
                y = top + band / 2 + 4.5 + (line - (len(names) - 1) / 2) * 11.5
                size = "" if len(names) == 1 else ' style="font-size:10.5px"'
                parts.append(f'<text class="in" x="{x + room / 2 - 5:.0f}" y="{y:.0f}"{size}>{word}</text>')
    height = 16 + len(BANDS) * (band + 12)
    arrow = f"M {width - 28} 24 V {height - 30} m -6 -9 l 6 9 l 6 -9"
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">
<title>The rooms of Sightline: each imports only rooms below it</title>
<style>
text {{ font-family: system-ui, sans-serif; font-size: 13px; fill: #1f2328 }}
.band {{ fill: #f3f5f8; stroke: #d5dae1 }} .room {{ fill: #ffffff; stroke: #9fb3d1 }} .name {{ font-weight: 600 }}
.in {{ text-anchor: middle }} .arrow {{ fill: none; stroke: #6b7c93; stroke-width: 2 }}
.note {{ fill: #6b7c93; font-size: 12px }}
</style>
<rect width="{width}" height="{height}" fill="#ffffff"/>
{chr(10).join(parts)}
<path class="arrow" d="{arrow}"/>
<text class="note" transform="translate({width - 12} {height / 2 + 30:.0f}) rotate(-90)">imports</text>
</svg>
"""
    (IMAGES / "architecture.svg").write_text(svg, encoding="utf-8")
    print(f"architecture.svg: {len(svg) // 1024} kB")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    architecture()
    for name, words in PREPARED.items():
        if not (folder / name).exists():
            sightline(words, folder)
    for name, words in RUNS.items():
        sightline(f"{words} --run.out {name}", folder)
    for picture in (report, show, mask, detection, terminal):
        picture(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/pictures.py FOLDER")
    main(Path(sys.argv[1]).resolve())
