"""The live page, in a real browser against a real server."""

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.daemon import Daemon, running
from support.tools import need

CHROMIUM = shutil.which("chromium")
KEY = "sk-page"
FOCUSABLE = "a[href], button:not(:disabled), input, textarea, [tabindex='0']"

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running("--max-num-seqs", "4", step_seconds=0.01) as started:
        yield started


@pytest.fixture(scope="module")
def locked() -> Iterator[Daemon]:
    with running("--api-key", KEY) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need(CHROMIUM, "Debian's package chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens a page, and checks at the end that it complained of nothing and asked no other server."""
    checks = []

    def opened(daemon: Daemon, status: str = "ready", complaints: str = "", **options: Any) -> Page:
        page = browser.new_page(**options)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(daemon.url)
        expect(page.locator("#status")).to_have_text(status)
        checks.append((page, daemon, said, asked, complaints))
        return page

    yield opened
    for page, daemon, said, asked, complaints in checks:
        page.close()
        assert not [text for text in said if not (complaints and re.search(complaints, text))]
        assert all(url.startswith((daemon.url, "data:,")) for url in asked)


def metric(daemon: Daemon, name: str, **labels: str) -> float:
    """The sum of the samples of a name that carry these labels."""
    found = 0.0
    for line in httpx.get(f"{daemon.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and all(f'{label}="{text}"' in head for label, text in labels.items()):
            found += float(value)
    return found


def number(page: Page, identity: str) -> float:
    return float(page.locator(f"#{identity}").inner_text().replace(",", ""))


def ask(page: Page, text: str, tokens: int = 20) -> None:
    page.fill("#max-tokens", str(tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")


def test_its_numbers_are_those_of_metrics_and_info(daemon: Daemon, visit: Open) -> None:
    page = visit(daemon)
    for _ in range(3):
        assert daemon.request([5, 6, 7] * 20, 30).status_code == 200
    expect(page.locator("#generated")).to_have_text(f"{metric(daemon, 'octavo_generation_tokens_total'):,.0f}")
    for identity, name, labels in (
        ("used", "octavo_kv_blocks", {"state": "used"}),
        ("cached", "octavo_kv_blocks", {"state": "cached"}),
        ("free", "octavo_kv_blocks", {"state": "free"}),
        ("running", "octavo_requests_running", {}),
        ("waiting", "octavo_requests_waiting", {}),
        ("finished", "octavo_request_success_total", {}),
        ("preempted", "octavo_preemptions_total", {}),
        ("generated", "octavo_generation_tokens_total", {}),
    ):
        assert number(page, identity) == metric(daemon, name, **labels), identity
    assert number(page, "cached") > 0
    queries, hits = (metric(daemon, f"octavo_prefix_cache_{name}_total") for name in ("queries", "hits"))
    assert hits > 0
    assert page.locator("#hits").inner_text() == f"{100 * hits / queries:.1f} %"
    allocated = 0.0
    for bucket in ("weights", "cache", "activations"):
        size, used, peak = (
            metric(daemon, "octavo_memory_bytes", bucket=bucket, kind=kind) for kind in ("allocated", "used", "peak")
        )
        expected = f"{size / 2**20:.1f} MiB, used {used / 2**20:.1f} MiB, peak {peak / 2**20:.1f} MiB"
        assert page.locator(f"#bucket-{bucket}").inner_text() == expected
        allocated += size
    assert page.locator("#allocated").inner_text() == f"{allocated / 2**20:.1f} MiB"
    assert page.locator("#budget").inner_text() == f"{metric(daemon, 'octavo_memory_budget_bytes') / 2**20:.1f} MiB"
    block = httpx.get(f"{daemon.url}/info").json()["model"]["block"]
    rows = [row.inner_text().split("\t") for row in page.locator("#block tr").all()]
    assert [(row[0], row[2], row[3], row[4]) for row in rows] == [
        (matrix["name"], matrix["receives"], matrix["produces"], f"{matrix['parameters']:,}") for matrix in block
    ]


def test_its_plots_show_speed_and_latencies_of_what_happens(daemon: Daemon, visit: Open) -> None:
    page = visit(daemon)
    daemon.request([9, 9], 100)
    expect(page.locator("#between-now")).to_have_text(re.compile(r"^[\d.]+ ms$"))
    # Steps take 10 ms and the network adds to it; the histogram's nearest bounds are 10, 15 and 20 ms.
    between, first = (float(page.locator(f"#{name}").inner_text()[:-3]) for name in ("between-now", "first-now"))
    assert between >= 7.5
    assert first > 0
    expect(page.locator("#rates path").first).to_have_attribute("d", re.compile("M.*L"))
    assert re.search(r"Tokens per second: .* at most \d", page.locator("#rates").get_attribute("aria-label"))


def test_a_chat_streams_and_goes_on(daemon: Daemon, visit: Open) -> None:
    page = visit(daemon)
    ask(page, "Hello?", 100)
    answer = page.locator("#log article").nth(1)
    # Text is there before the answer is complete.
    page.wait_for_function(
        "() => { const a = document.querySelectorAll('#log article')[1];"
        " return a && a.getAttribute('aria-busy') === 'true' && a.querySelector('p').textContent.length > 0; }"
    )
    expect(answer).to_have_attribute("aria-busy", "false")
    messages = [{"role": "user", "content": "Hello?"}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 100}
    whole = httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer.locator("p").text_content() == whole["choices"][0]["message"]["content"]
    assert answer.locator(".note").inner_text().startswith("100 tokens in ")
    ask(page, "And?")
    expect(page.locator("#log .note")).to_have_count(2)
    messages += [
        {"role": "assistant", "content": answer.locator("p").text_content()},
        {"role": "user", "content": "And?"},
    ]
    second = httpx.post(
        f"{daemon.url}/v1/chat/completions", json=body | {"messages": messages, "max_tokens": 20}
    ).json()
    text = page.locator("#log article").nth(3).locator("p").text_content()
    assert text == second["choices"][0]["message"]["content"]
    page.click("#clear")
    expect(page.locator("#log article")).to_have_count(0)


def test_stop_ends_the_request_and_a_refusal_is_shown(daemon: Daemon, visit: Open) -> None:
    aborted = metric(daemon, "octavo_request_success_total", finished_reason="abort")
    page = visit(daemon, complaints="status of 400")
    ask(page, "Go on", 1900)
    expect(page.locator("#log p").nth(1)).not_to_be_empty()
    page.click("#stop")
    expect(page.locator("#log .note")).to_have_text("stopped")
    while metric(daemon, "octavo_request_success_total", finished_reason="abort") == aborted:
        page.wait_for_timeout(20)
    page.click("#clear")
    ask(page, "a " * 5000)
    expect(page.locator("#log .note")).to_contain_text("maximum context length")


def test_nothing_needs_sideways_scrolling_on_a_phone(daemon: Daemon, visit: Open) -> None:
    page = visit(daemon, viewport={"width": 360, "height": 740})
    ask(page, "x" * 200)
    expect(page.locator("#log .note")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_keyboard_reaches_everything_and_shows_where_it_is(daemon: Daemon, visit: Open) -> None:
    page = visit(daemon)
    wanted = set(
        page.evaluate(
            """selector => [...document.querySelectorAll(selector)].filter(e => e.checkVisibility())
            .map(e => e.id || e.className)""",
            FOCUSABLE,
        )
    )
    assert {"message", "send", "clear", "log", "scroll"} <= wanted
    reached = set()
    for _ in range(2 * len(wanted)):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert page.evaluate(
            "[document.activeElement].every(e => e === document.body || getComputedStyle(e).outlineStyle !== 'none')"
        )
    assert wanted <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(scheme: str, daemon: Daemon, locked: Daemon, visit: Open) -> None:
    page = visit(daemon, color_scheme=scheme)
    ask(page, "Hello?")
    expect(page.locator("#log .note")).to_have_count(1)
    for shown in (page, visit(locked, "a key is needed", "status of 401", color_scheme=scheme)):
        shown.wait_for_timeout(600)  # bars move to their places
        found = Axe().run(shown)
        assert found.violations_count == 0, found.generate_report()


def test_whoever_wants_less_motion_gets_none(daemon: Daemon, visit: Open) -> None:
    page = visit(daemon, reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.querySelector('.bar > span')).transitionDuration") == "0s"


def test_with_keys_the_page_is_open_and_empty_until_it_is_given_one(locked: Daemon, visit: Open) -> None:
    page = visit(locked, "a key is needed", "status of 401")
    assert page.locator("#used").inner_text() == "\N{EN DASH}"
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-problem")).to_have_text("The server does not know this key.")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#access")).to_be_hidden()
    assert number(page, "free") == metric(locked, "octavo_kv_blocks", state="free")
    ask(page, "Hello?")
    expect(page.locator("#log .note")).to_contain_text("20 tokens in ")
    places = "location.href, document.cookie, {...localStorage}, {...sessionStorage}, document.body.innerHTML"
    assert KEY not in page.evaluate(f"JSON.stringify([{places}])")


def test_the_browser_may_ask_nobody_else(daemon: Daemon, locked: Daemon, visit: Open) -> None:
    page = visit(daemon, complaints="Content.Security.Policy|violates")
    assert page.evaluate("url => fetch(url).then(() => 'answered', () => 'refused')", locked.url) == "refused"
    assert page.evaluate("() => fetch('version').then(() => 'answered', () => 'refused')") == "answered"
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.injected = true'}))"
    )
    assert page.evaluate("window.injected") is None


def test_the_page_is_one_file_that_refers_to_nothing(locked: Daemon) -> None:
    response = httpx.get(locked.url)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(
        r"""(?:src|href)=["'](?!data:,)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", response.text
    )
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert httpx.head(locked.url).headers["content-length"] == str(len(response.content))
    assert httpx.post(locked.url).status_code == 401


def test_without_it_there_is_nothing_at_the_root() -> None:
    with running("--no-page") as daemon:
        assert httpx.get(daemon.url).status_code == 404
