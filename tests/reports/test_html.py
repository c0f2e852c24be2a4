"""The page is read back by parsers of HTML and XML, and drawn by a browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import reporting

from ckptkit.errors import Finding
from ckptkit.files.checkpoint import Checkpoint
from ckptkit.reports.html import html
from ckptkit.reports.model import Stats, Totals
from ckptkit.reports.report import Report
from ckptkit.reports.svg import count_ticks, log_ticks

FIGURES = ("errors", "distribution", "experts", "dtypes", "shards")
VOID = {"meta", "br", "link", "img"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>\x00\udcff&amp;"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return reporting.load("mixtral-8x7b", tmp_path_factory.mktemp("mixtral") / "model")


def compared(checkpoint: Checkpoint, **odd: float | None) -> list[dict[str, Any]]:
    """Made-up errors of every matrix, all within the bound but the ``odd`` ones."""
    names = [name for name, ref in checkpoint.tensors.items() if len(ref.shape) == 2 and "embed" not in name]
    made = {name: 0.08 + 0.0001 * (index % 97) for index, name in enumerate(names)}
    return [
        {
            "tensor": name,
            "rel_rms": error,
            "max_abs": 0.1,
            "cos": 0.996,
            "bound": 0.12,
            "beyond": int((error or 0) > 0.12),
        }
        for name, error in (made | odd).items()
    ]


def full(checkpoint: Checkpoint, **odd: float | None) -> Report:
    """A report that has something for every figure."""
    ref = checkpoint.tensors["model.layers.7.self_attn.o_proj.weight"]
    findings = [
        Finding("numeric.error", "beyond its bound", file=ref.file, tensor=ref.name, hint="ckptkit quantize again"),
        Finding("config.arch", "unknown", file="config.json", severity="warning"),
    ]
    numeric, heads = {"tensors": compared(checkpoint, **odd)}, {"lm_head.weight": {"rows": reporting.AGREEMENT}}
    outcome = reporting.outcome(findings, {"numeric.oracle": "no --oracle"}, numeric=numeric, heads=heads)
    report = reporting.report(outcome, checkpoint, checkpoint)
    assert report.stats is not None
    before = Totals(tensors=9, parameters=9, bytes=4 * report.stats.bytes, by_dtype={"F32": 4 * report.stats.bytes})
    return report.model_copy(update={"stats": report.stats.model_copy(update={"against": before})})


class Page(HTMLParser):
    """Tags, attributes and text of a page; ``open`` is empty if every tag was closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.text, self.open = "", [""]
        self.feed(text)
        assert self.open == [""], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def drawings(text: str) -> dict[str, ElementTree.Element]:
    """Every drawing by the name that its title's id begins with."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]
    return {str(svg[0].get("id")).removesuffix("-title"): svg for svg in found}


def test_the_page_needs_nothing_from_elsewhere(mixtral: Checkpoint) -> None:
    text = html(full(mixtral))
    page = Page(text)
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object", "image", "use"}
    assert not [name for name, _ in page.attributes if name in {"src", "href", "xlink:href", "srcset", "action"}]
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import|@font-face", text)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes  # and would not be let


def test_whatever_a_checkpoint_is_called_stays_text(mixtral: Checkpoint) -> None:
    finding = Finding("names.orphan", HOSTILE, file=HOSTILE, tensor=HOSTILE, hint=HOSTILE, data={HOSTILE: [HOSTILE]})
    numeric = {"tensors": [{"tensor": f"model.{HOSTILE}.0.{HOSTILE}.weight", "rel_rms": 0.1, "max_abs": 0.1}]}
    outcome = reporting.outcome([finding], {"numeric.head": HOSTILE}, numeric=numeric)
    text = html(reporting.report(outcome, mixtral, target={"uri": HOSTILE}, environment={"python": HOSTILE}))
    page = Page(text)
    assert not page.tags.keys() & {"script", "img"}
    assert not [name for name, _ in page.attributes if name in {"src", "onerror"}]
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert "\x00" not in text
    assert "errors-0" in drawings(text)


def test_figures_with_data_are_drawn_and_described(mixtral: Checkpoint) -> None:
    text = html(full(mixtral))
    assert [value for name, value in Page(text).attributes if name == "id" and value in FIGURES] == list(FIGURES)
    found = drawings(text)
    assert set(found) == {"errors-0", "errors-loose", "distribution-0", "experts-0", "dtypes-0", "shards-0"}
    for name, svg in found.items():
        title, desc, *shapes = svg
        assert (title.tag, desc.tag, svg.get("role")) == ("title", "desc", "img")
        assert title.text
        assert desc.text
        assert svg.get("aria-labelledby") == f"{name}-title {name}-desc"
        assert any(shape.tag == "text" for shape in shapes)


def test_figures_without_data_are_told_and_not_drawn(mixtral: Checkpoint) -> None:
    unread = Stats(tensors=0, parameters=0, bytes=0, by_dtype={})
    text = html(reporting.report(reporting.outcome(), mixtral, stats=unread))
    assert not drawings(text)
    assert Page(text).tags["figure"] == 0
    titles = ["Error by layer and module", "Distribution of the error", "Error by expert", "Bytes by dtype", "Shards"]
    told = Page(text).text
    assert [title for title in titles if told.count(title) != 1] == []
    of_no_checkpoint = Page(html(reporting.report(reporting.outcome(), mixtral, stats=None))).text
    assert not any(title in of_no_checkpoint for title in titles)
    nothing = reporting.outcome(numeric={"tensors": []})
    assert set(drawings(html(reporting.report(nothing, mixtral)))) == {"dtypes-0", "shards-0"}
    exact = [{"tensor": "lm_head.weight", "rel_rms": 0.0, "max_abs": 0.0}]
    only_exact = html(reporting.report(reporting.outcome(numeric={"tensors": exact}), mixtral))
    assert set(drawings(only_exact)) == {"errors-loose", "dtypes-0", "shards-0"}


def test_nothing_is_drawn_outside_its_picture(mixtral: Checkpoint) -> None:
    odd = {"model.layers.3.self_attn.q_proj.weight": None, "model.layers.4.self_attn.q_proj.weight": 90.0}
    for svg in drawings(html(full(mixtral, **odd))).values():
        _, _, width, height = map(float, str(svg.get("viewBox")).split())
        for shape in svg.iter("rect"):
            x, y, w, h = (float(str(shape.get(key))) for key in ("x", "y", "width", "height"))
            assert min(x, y, w, h) >= 0
            assert x + w <= width + 0.1
            assert y + h <= height + 0.1
        for text in svg.iter("text"):
            x, y = float(str(text.get("x"))), float(str(text.get("y")))
            room = {None: width - x, "end": x, "middle": 2 * min(x, width - x)}[text.get("text-anchor")]
            if text.get("transform") is None:
                assert 6.1 * len(text.text or "") <= room + 12, text.text
                assert 8 <= y <= height


def test_the_map_of_errors_has_a_cell_for_each_module_of_each_layer(mixtral: Checkpoint) -> None:
    odd = {"model.layers.3.self_attn.q_proj.weight": 0.31, "model.layers.9.self_attn.k_proj.weight": None}
    report = full(mixtral, **odd)
    assert report.numeric is not None
    svg = drawings(html(report))["errors-0"]
    cells = [cell for cell in report.numeric.cells if cell.layer is not None]
    tips = [rect[0].text for rect in svg.iter("rect") if rect.get("class") == "heat" and len(rect)]
    assert len(tips) == len(cells)
    assert "model.layers.3.self_attn.q_proj: 0.310 (1 tensor)" in tips
    experts = re.compile(r"model\.layers\.3\.block_sparse_moe\.experts\.\d\.w1\.weight")
    worst = max(tensor["rel_rms"] for tensor in compared(mixtral) if experts.fullmatch(tensor["tensor"]))
    assert f"model.layers.3.block_sparse_moe.experts.#.w1: {worst:#.3g} (8 tensors)" in tips
    assert [rect.get("class") for rect in svg.iter("rect")].count("frame") == 2  # the one that is no number as well
    values = [text.text for text in svg.iter("text")]
    assert {"! 0.310", "! n/a", "q_proj", "w1", "31"} <= set(values)


def test_bars_are_as_long_as_what_they_stand_for(mixtral: Checkpoint) -> None:
    report = full(mixtral)
    assert report.numeric is not None
    assert report.numeric.histogram is not None
    assert report.stats is not None
    found = drawings(html(report))
    counts = [count for count in report.numeric.histogram.counts if count]
    heights = [float(str(bar.get("height"))) for bar in found["distribution-0"].iter("rect") if len(bar)]
    assert [height / max(heights) for height in heights] == pytest.approx([c / max(counts) for c in counts], abs=0.02)
    bars = [float(str(rect.get("width"))) for rect in found["dtypes-0"].iter("rect") if len(rect)]
    assert bars[0] / bars[1] == pytest.approx(4, rel=1e-3)
    rows: dict[str, float] = {}
    for rect in found["shards-0"].iter("rect"):
        rows[str(rect.get("y"))] = rows.get(str(rect.get("y")), 0.0) + float(str(rect.get("width")))
    per_byte = [width / bar.bytes for width, bar in zip(rows.values(), report.stats.shard_map, strict=True)]
    assert per_byte == pytest.approx([max(per_byte)] * len(per_byte), rel=0.01)


def test_faulty_tensors_are_marked_in_words_and_by_shape(mixtral: Checkpoint) -> None:
    report = full(mixtral)
    assert report.stats is not None
    svg = drawings(html(report))["shards-0"]
    (faulty,) = [bar for bar in report.stats.shard_map if bar.faulty]
    (tip,) = [rect[0].text for rect in svg.iter("rect") if rect.get("class") == "bad"]
    assert str(tip).startswith("model.layers.7.self_attn.o_proj.weight: BF16")
    assert len([path for path in svg.iter("path") if path.get("class") == "mark"]) == 1
    labels = [text.text or "" for text in svg.iter("text")]
    assert faulty.file.removesuffix(".safetensors") in labels
    assert len([label for label in labels if "faulty" in label]) == 1


def test_many_findings_are_folded_and_cut_ones_counted(mixtral: Checkpoint) -> None:
    findings = [Finding("data.nan", f"has NaN {n}", tensor=f"t{n}", hint="look") for n in range(130)]
    page = Page(html(reporting.report(reporting.outcome(findings), mixtral, max_findings=50)))
    assert page.text.count("has NaN") == 50
    assert "40 more" in page.text
    assert "80 more are not in this report" in page.text
    assert page.text.count("hint:") == 1


def test_agreement_of_heads_is_a_table(mixtral: Checkpoint) -> None:
    page = Page(html(full(mixtral)))
    assert "Logits of converted heads" in page.text
    for text in ("32 rows", "96.9%", "97.5%", "98.0%", "0.0012", "0.25"):
        assert text in page.text


def test_a_page_is_the_same_for_the_same_report(mixtral: Checkpoint) -> None:
    assert html(full(mixtral)) == html(full(mixtral))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.04, 0.3, [0.05, 0.1, 0.2]),
        (1e-7, 2, [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]),
        (0.011, 0.019, [0.011, 0.012, 0.013, 0.014, 0.015, 0.016, 0.017, 0.018, 0.019]),
        (0.14, 0.26, [0.15, 0.2, 0.25]),
    ],
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == expected


@pytest.mark.parametrize(("high", "expected"), [(1, [0, 1]), (9, [0, 2, 4, 6, 8]), (1234, [0, 500, 1000])])
def test_ticks_of_counts(high: int, expected: list[int]) -> None:
    assert count_ticks(high) == expected


# --- in a browser ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no chromium to draw the page with")
    return found


class Proxy(BaseHTTPRequestHandler):
    """What everything that a browser fetches goes through; it keeps the addresses and answers with nothing."""

    asked: ClassVar[list[str]] = []

    def answer(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    do_GET = do_POST = do_HEAD = do_CONNECT = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[int]:
    Proxy.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def fetched() -> list[str]:
    """The addresses asked for; a browser asks its maker for updates, whatever page it shows."""
    return [address for address in Proxy.asked if not re.search(r"\.(google|googleapis|gvt1)\.com", address)]


@pytest.mark.slow
def test_a_browser_draws_every_figure_and_fetches_nothing(
    mixtral: Checkpoint, browser: str, proxy: int, tmp_path: Path
) -> None:
    text = html(full(mixtral))
    page, other, picture = tmp_path / "report.html", tmp_path / "other.html", tmp_path / "report.png"
    page.write_text(text, "utf-8")
    other.write_text("<!doctype html><img src='http://elsewhere.example/x.png'>", "utf-8")

    def show(path: Path, *options: str) -> str:
        own = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1200,3000"]
        own += [f"--user-data-dir={tmp_path / 'profile'}", f"--proxy-server=127.0.0.1:{proxy}"]
        command = [browser, *own, *options, path.as_uri()]
        return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout

    shown = show(page, "--dump-dom")
    assert shown.count("<svg") == len(drawings(text)) == 6
    assert shown.count("<figure") == len(FIGURES)
    show(page, f"--screenshot={picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000  # an empty page of this size takes a tenth of it
    assert fetched() == []
    show(other, "--dump-dom")
    assert fetched() == ["http://elsewhere.example/x.png"]
