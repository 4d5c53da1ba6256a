"""The built site in a browser: every page at two widths, light and dark, its links, and its search."""

import functools
import http.server
import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from docutils.nodes import make_id

from safe_trainers.explain.known_errors import upstream_entries
from safe_trainers.explain.metrics import metrics


ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium"),
    pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="playwright is not installed; pip install '.[browser]'"),
    pytest.mark.timeout(600),
]
WIDTHS = (1280, 390)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FAR_WIDER = {"trainers", "families", "sampler", "matrix", "cost_tables"}
"""Pages of measurements whose tables may scroll on a screen of 1280 pixels."""
MEASURE = """() => {
  const wide = (element) => element.scrollWidth > element.clientWidth + 1;
  const first = (element) => element.innerText.trim().slice(0, 60);
  const whole = document.documentElement;
  const found = {page: whole.scrollWidth - whole.clientWidth, tables: [], code: [], figures: [], hidden: []};
  for (const table of document.querySelectorAll(".table-wrapper")) if (wide(table)) {
    found.tables.push(first(table));
    const style = getComputedStyle(table);
    if (style.overflowX !== "auto" || !style.backgroundImage.includes("gradient")) found.hidden.push(first(table));
  }
  for (const code of document.querySelectorAll(".highlight pre")) if (wide(code)) found.code.push(first(code));
  for (const svg of document.querySelectorAll("figure.plot svg")) {
    const texts = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect().height);
    const ink = getComputedStyle(svg).color, ground = getComputedStyle(document.body).backgroundColor;
    found.figures.push({smallest: Math.min(...texts), ink, ground});
  }
  return found;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, as a folder and as an address."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", str(ROOT / "docs"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


def names(folder):
    return sorted(path.name for path in folder.glob("*.html"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_has_no_error(site, browser, width, scheme):
    folder, address = site
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong = []
    page.on("console", lambda message: wrong.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    for name in names(folder):
        page.goto(f"{address}/{name}")
        found = page.evaluate(MEASURE)
        if found["page"] > 1:
            wrong.append(f"{name} is {found['page']} pixels wider than the screen")
        wrong += [f"{name}: a table scrolls without showing it: {table}" for table in found["hidden"]]
        if width == 1280:
            wrong += [f"{name}: a block of code is cut: {code}" for code in found["code"]]
            if name.partition(".")[0] not in FAR_WIDER:
                wrong += [f"{name}: a table is cut: {table}" for table in found["tables"]]
        for figure in found["figures"]:
            if figure["smallest"] < 9:
                wrong.append(f"{name}: letters of a figure are {figure['smallest']:.0f} pixels high")
            if contrast(figure["ink"], figure["ground"]) < 4.5:
                wrong.append(f"{name}: letters of a figure are {figure['ink']} on {figure['ground']}")
    page.close()
    assert wrong == []


def contrast(one, other):
    """The ratio of the luminances of two CSS colours, as WCAG defines it."""

    def luminance(colour):
        red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_of_black_and_white():
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(255, 255, 255)", "rgb(255, 255, 255)") == pytest.approx(1)


def test_every_link_and_anchor_exists(site):
    folder, _ = site
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', (folder / name).read_text())) for name in names(folder)}
    wrong = []
    for name in names(folder):
        for target in re.findall(r'<a [^>]*href="([^"]+)"', (folder / name).read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            if file and file not in anchors:
                wrong += [f"{name}: {target}"] if not (folder / file).exists() else []
            elif anchor and anchor not in anchors[file or name]:
                wrong.append(f"{name}: {target}")
    assert wrong == []


def results(page, address, query):
    """The addresses of the first results of a search, without the server."""
    page.goto(f"{address}/search.html?q={query.replace(' ', '+')}")
    done = (
        "document.querySelector('#search-results p.search-summary')?.innerText.includes('search')"
        " || document.querySelectorAll('#search-results li').length > 0"
    )
    page.wait_for_function(done, timeout=15000)
    page.wait_for_timeout(150)
    links = page.eval_on_selector_all(
        "#search-results li > a", "items => items.map(item => item.getAttribute('href'))"
    )
    return [re.sub(r"\?[^#]*", "", link) for link in links]


def leads_to(link, expected):
    """Whether a result leads to a page, or to an anchor if one is expected."""
    return link == expected or link.partition("#")[0] == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("T4", "hardware.html"),
        ("A100", "hardware.html"),
        ("V100", "hardware.html"),
        ("NaN", "nan.html"),
        ("QLoRA", "lora.html"),
        ("vLLM", "vllm.html"),
        ("FSDP2", "distributed.html"),
        ("FAQ", "faq.html"),
        ("pip install", "quickstart.html"),
        ("unscale FP16 gradients", "errors.html#unscale-fp16-gradients"),
        ("fp32_modules", "config.html#fp32-modules"),
        ("bf16-is-emulated", "refusals.html#bf16-is-emulated"),
        ("SafeGRPOTrainer", "api.html#safe_trainers.SafeGRPOTrainer"),
    ],
)
def test_a_search_finds_the_page(site, browser, query, expected):
    page = browser.new_page()
    found = results(page, site[1], query)
    page.close()
    near = found[:5] if expected != "quickstart.html" else found
    assert any(leads_to(link, expected) for link in near), found[:6]


def test_a_search_finds_each_metric_at_its_anchor(site, browser):
    page = browser.new_page()
    missed = []
    for name in metrics():
        wanted = f"metrics.html#{name.replace('_', '-')}"
        name = (metrics()[name].names or (name,))[0]
        if not any(leads_to(link, wanted) for link in results(page, site[1], name)[:1]):
            missed.append(name)
    page.close()
    assert missed == []


def test_a_search_finds_messages_at_their_anchors(site, browser):
    page = browser.new_page()
    missed = []
    for entry in list(upstream_entries().values())[::6]:
        fixed = max(re.split("…", entry.messages[0]), key=len)
        found = results(page, site[1], fixed.strip(" `"))[:3]
        if not any(leads_to(link, f"errors.html#{make_id(entry.id)}") for link in found):
            missed.append((fixed, found))
    page.close()
    assert missed == []


def test_blocks_have_a_button_that_copies_them(site, browser):
    page = browser.new_page()
    page.goto(f"{site[1]}/quickstart.html")
    buttons = page.eval_on_selector_all("button.copybtn", "items => items.length")
    blocks = page.eval_on_selector_all("div.highlight pre", "items => items.length")
    page.close()
    assert buttons == blocks > 5
