"""`moeserve viz`: reads records of expert load, plans a better placement for them, and shows both."""

from __future__ import annotations

from pathlib import Path

from moeserve.errors import SettingsError
from moeserve.expert_placement.eplb import eplb, rank_loads
from moeserve.telemetry.expert_load import LoadWindow, read_windows, summed
from moeserve.telemetry.load_image import as_png
from moeserve.telemetry.load_page import as_html
from moeserve.telemetry.load_table import as_text


def show(
    path: Path, *, html_path: Path | None = None, png_path: Path | None = None, num_redundant: int | None = None
) -> str:
    """What the records of a file show: written to the files that are named, or else as a table.

    Args:
        path: as from `write_window`.
        html_path: a page for a browser goes there.
        png_path: a picture goes there.
        num_redundant: all of them also show how even ranks would have been, had experts been placed by these very
            loads, in so many slots more than one for each expert; None: they do not.

    Returns:
        The table, or the names of the files that were written, one on a line.

    Raises:
        SettingsError: a file that cannot be read or written, or whose name is not that of a page or a picture, one file
            for both, or a number of slots that cannot be.
    """
    if html_path is not None and png_path is not None and html_path.resolve() == png_path.resolve():
        raise SettingsError(f"the page and the picture cannot both be written to {png_path}; name two files")
    _check_name(html_path, "page", (".html", ".htm"))
    _check_name(png_path, "picture", (".png",))
    windows = read_windows(path)
    planned = None if num_redundant is None else plan(summed(windows), num_redundant)
    outputs: list[tuple[Path, bytes]] = []
    if html_path is not None:
        outputs.append((html_path, as_html(windows, planned, title=f"Expert load: {path.name}").encode()))
    if png_path is not None:
        outputs.append((png_path, as_png(windows, planned)))
    for output_path, content in outputs:
        try:
            if output_path.exists() and output_path.samefile(path):
                raise SettingsError(f"{output_path} holds the expert loads that are shown; name another file to write")
            output_path.write_bytes(content)
        except OSError as error:
            raise SettingsError(f"cannot write {output_path}: {error.strerror}") from None
    return "\n".join(str(output_path) for output_path, _ in outputs) or as_text(windows, planned)


def _check_name(path: Path | None, what: str, suffixes: tuple[str, ...]) -> None:
    """Programs tell by a file's name what is in it, so a picture must not be called a page."""
    if path is not None and path.suffix.lower() not in suffixes:
        raise SettingsError(f"the {what} cannot be written to {path}: its name must end in {' or '.join(suffixes)}")


def plan(total: LoadWindow, num_redundant: int) -> tuple[tuple[float, ...], ...]:
    """By layer, by rank: the tokens that ranks would have been given with a placement made for these loads."""
    num_slots = total.num_experts + num_redundant
    return tuple(rank_loads(loads, eplb(loads, total.num_ranks, num_slots)) for loads in total.tokens_of_expert)
