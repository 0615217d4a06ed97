"""Draws the pictures of the documents: `python tests/pictures.py`, or `make pictures`."""

import re
from pathlib import Path

import dtorchjax as dt

FOLDER = Path(__file__).parent.parent / "docs"


def placements(mesh):
    """An array whose dims are both sharded, and one in terms, one below the other."""
    drawn = [
        dt.visualize(dt.zeros((10, 8), mesh, ["S0", "S1"])).svg,
        dt.visualize(dt.zeros((10, 8), mesh, ["S0", "P"])).svg,
    ]
    parts, width, top = [], 0.0, 0.0
    for svg in drawn:
        head, inside = re.match(r"<svg ([^>]*)>(.*)</svg>", svg, re.DOTALL).groups()
        wide, high = (float(n) for n in re.search(r'viewBox="0 0 (\S+) (\S+)"', head).groups())
        parts.append(f'<g transform="translate(0,{top:g})">{inside}</g>')
        width, top = max(width, wide), top + high
    fonts = re.search(r"font-family.*", head)[0]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{top:g}" '
        f'viewBox="0 0 {width:g} {top:g}" {fonts}>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    dt.simulate_devices(8)
    mesh = dt.init_device_mesh((2, 4), ("dp", "tp"))
    (FOLDER / "placements.svg").write_text(placements(mesh))
