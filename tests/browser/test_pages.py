"""`make test-browser`: the dashboard and the report in a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import Watched, dashboard
from support.run_dirs import MadeRun, make_run

from bench.harness.ledger_maker import make_ledger
from headpond.servers.dashboard.report import write_report

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> \u202egnirts\u2066 \x00\x07\x1b[31m "
    "</div></script><!-- {{7*7}} javascript:alert(1) \ud83d\ude00"
)
Open = Callable[..., Watched]
MILLION = 1_000_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    talks = [
        [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "the answer is four"}],
        [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "the answer is five"}],
        [{"role": "user", "content": "x" * MILLION}, {"role": "tool", "content": HOSTILE, "name": HOSTILE}],
    ]
    return make_run(tmp_path_factory.mktemp("runs") / "made", conversations=talks)


@pytest.fixture(scope="module")
def url(run: MadeRun) -> Iterator[str]:
    with dashboard(run.path) as url:
        yield url


def test_every_page_loads_without_an_error_and_without_another_server(url: str, watched: Open) -> None:
    page = watched(url).open()
    expect(page.get_by_text("its process has died")).to_be_visible()
    expect(page.locator("figure svg.chart").first).to_be_visible()
    for tab, heading in (("Waterfall", "Waterfall"), ("Rollouts", "Rollouts"), ("Settings", "Compare")):
        page.get_by_role("link", name=tab).click()
        expect(page.get_by_role("heading", level=1, name=heading)).to_be_visible()


def test_the_labels_of_an_axis_are_shown_in_whole(url: str, watched: Open) -> None:
    page = watched(url).open()
    expect(page.locator("figure svg.chart text", has_text=re.compile("00,000$")).first).to_be_visible()
    lefts = page.evaluate("[...document.querySelectorAll('svg.chart text')].map((text) => text.getBBox().x)")
    assert min(lefts) >= 0


def test_a_loss_of_the_waterfall_leads_to_its_rollouts_and_one_of_them_to_its_tokens(url: str, watched: Open) -> None:
    page = watched(url).open("#/0/waterfall")
    page.get_by_role("link", name=re.compile("zero_variance")).click()
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_role("link", name="g0001000-2").click()
    expect(page.get_by_text("files of dropped rollouts are deleted").first).to_be_visible()


def test_hostile_text_is_shown_as_text(url: str, watched: Open) -> None:
    each = watched(url)
    page = each.open("#/0/rollout/g0000001-0")
    shown = page.locator(".message .text").first.text_content() or ""
    assert "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>" in shown
    assert "⟨U+202E⟩gnirts⟨U+2066⟩ ␀␇␛[31m" in shown
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0


def test_a_timeline_shows_when_turns_tools_and_grading_ran(url: str, watched: Open) -> None:
    each = watched(url)
    page = each.open("#/0/rollout/g0000001-0")
    assert [page.locator(f".lane .{kind}").count() for kind in ("turn", "tool", "grading", "program")] == [3, 1, 1, 0]
    page.get_by_text("5 times").click()
    expect(page.get_by_role("row", name="tool search 600 ms 150 ms")).to_be_visible()
    first, last = (page.locator(".lane .turn").nth(number).bounding_box() for number in (0, 2))
    assert first
    assert last
    assert first["width"] / last["width"] == pytest.approx(0.5 / 0.2, rel=0.1), "drawn to scale"
    each.go("#/0/rollout/g0000002-0")
    expect(page.get_by_text("Turns and tools have no times")).to_be_visible()


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, watched: Open) -> None:
    with dashboard(tmp_path / "later", "--wait") as url:
        page = watched(url, refusals=True).open()
        expect(page.get_by_role("alert")).to_contain_text("has no run yet")
        make_run(tmp_path / "later")
        expect(page.locator("figure svg.chart").first).to_be_visible()


def test_a_message_of_a_million_characters_is_read_in_parts(url: str, watched: Open) -> None:
    page = watched(url).open("#/0/rollout/g0000001-2")
    text = page.locator(".message .text").first
    assert len(text.text_content() or "") == 20_000
    for _ in range(5):
        page.get_by_role("button", name="Show more of 1,000,000 characters").click()  # waits until it is enabled
    expect(page.get_by_role("button", name="Show more")).to_have_count(0)
    assert len(text.text_content() or "") == MILLION


def test_a_group_marks_where_conversations_differ(url: str, watched: Open) -> None:
    page = watched(url).open("#/0/group/g0000001?show=0,1")
    assert page.locator("mark.differs").all_text_contents() == ["five"]
    page.get_by_label("show g0000001-2").check()
    expect(page.locator(".columns > div")).to_have_count(3)


def test_the_token_strip_is_coloured_by_the_chosen_value_and_reached_by_keys(url: str, watched: Open) -> None:
    page = watched(url).open("#/0/rollout/g0000001-1")
    assert page.locator(".t").count() == 30 + 1
    assert page.locator(".t.break").count() == 1
    for name in ("logprob", "advantage", "routing", "version"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_role("button", name=name, exact=True)).to_have_attribute("aria-pressed", "true")
    page.locator(".strip").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".picked")).to_contain_text("token 1")
    expect(page.locator(".picked")).to_contain_text("context")


def test_curves_and_the_banner_update_while_a_run_goes_on(tmp_path: Path, watched: Open) -> None:
    import fcntl

    run = make_run(tmp_path / "live")
    status = json.loads((run.path / "status.json").read_text())
    with (run.path / "lock").open("w") as lock, dashboard(run.path) as url:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its orchestrator does
        status["at"] = 4e9  # never silent
        (run.path / "status.json").write_text(json.dumps(status))
        page = watched(url).open()
        expect(page.locator("#banner")).to_contain_text("the engine: it does not answer")
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "reward_mean": 0.875}\n')
        (run.path / "status.json").write_text(json.dumps(status | {"waiting_for": []}))
        expect(page.locator("figcaption .now").first).to_have_text("0.875", timeout=20_000)
        expect(page.locator("#banner")).not_to_contain_text("the engine: it does not answer", timeout=20_000)


def test_pages_go_through_a_million_rollouts(tmp_path: Path, watched: Open) -> None:
    run = make_run(tmp_path / "large")
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"):
        (run.path / name).unlink(missing_ok=True)
    make_ledger(run.path / "ledger.sqlite", MILLION)
    with dashboard(run.path) as url:
        each = watched(url)
        page = each.open("#/0/rollouts")
        assert _first(page) == "g0125000-7"
        page.get_by_role("link", name="Older").click()
        expect(page.locator("tbody tr td a").first).to_have_text("g0124994-5")
        each.go("#/0/rollouts?before=g0000003-0")
        assert page.locator("tbody tr").count() == 16
        each.go("#/0/rollouts?state=dead")
        assert page.locator("tbody tr").count() == 50
        each.go("#/0/waterfall")
        expect(page.locator(".fall .amount").first).to_contain_text("1.0 M", timeout=60_000)
        expect(page.get_by_text("of the ledger is summed")).to_have_count(0, timeout=60_000)


def _first(page: Page) -> str:
    return page.locator("tbody tr td a").first.text_content() or ""


@pytest.mark.parametrize("options", [{"color_scheme": "dark"}, {"viewport": {"width": 375, "height": 700}}])
def test_pages_fit_a_phone_and_have_dark_colours(url: str, watched: Open, options: dict[str, object]) -> None:
    each = watched(url, **options)
    page = each.open()
    for place in ("#/0/overview", "#/0/waterfall", "#/0/rollouts", "#/0/group/g0000001", "#/0/rollout/g0000001-0"):
        each.go(place)
        page.locator("main .panel").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{place} is wider than the screen"
    each.go("#/0/group/g0000001?show=0,1")
    colour = "getComputedStyle(document.querySelector(NAME)).color"
    marked, plain = (page.evaluate(colour.replace("NAME", repr(name))) for name in ("mark.differs", ".message .text"))
    assert marked == plain, "readable on the mark's background"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(16, 20, 22)") == (options.get("color_scheme") == "dark")


def test_no_choice_of_the_token_strip_is_cut_off_on_a_phone(url: str, watched: Open) -> None:
    page = watched(url, viewport={"width": 375, "height": 700}).open("#/0/rollout/g0000001-1")
    choices = page.locator(".seg").last
    names = choices.get_by_role("button").all_text_contents()
    assert {"mask", "logprob", "advantage", "routing", "version"} <= set(names)
    frame = choices.bounding_box()
    assert frame
    for button in choices.get_by_role("button").all():
        box = button.bounding_box()
        assert box
        assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1, button.text_content()
        assert box["y"] + box["height"] <= frame["y"] + frame["height"] + 1, button.text_content()


def test_every_page_is_reached_by_the_keyboard(url: str, watched: Open) -> None:
    page = watched(url).open()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Rollouts":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="Rollouts")).to_be_visible()


def test_two_runs_are_compared(run: MadeRun, tmp_path: Path, watched: Open) -> None:
    other = make_run(tmp_path / "other", steps=4, settings={"seed": 0, "advantages.estimator": "rloo"})
    with dashboard(run.path, other.path) as url:
        page = watched(url).open("#/0/compare")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody tr")).to_contain_text("advantages.estimator")
        assert page.locator("path.line.s1").count() >= 1


def test_a_report_shows_the_same_pictures_without_a_server(run: MadeRun, tmp_path: Path, watched: Open) -> None:
    path = write_report([run.path], tmp_path / "report.html")
    each = watched("file:///")
    page = each.page
    page.goto(path.as_uri())
    page.locator("html[data-drawn]").wait_for(state="attached")
    expect(page.locator("figure svg.chart").first).to_be_visible()
    each.go("#/0/waterfall")
    page.get_by_role("link", name=re.compile("zero_variance")).click()
    expect(page.locator("tbody tr")).to_have_count(3)
    each.go("#/0/rollout/g0000001-0")
    assert "<script>window.hacked = 1</script>" in (page.locator(".message .text").first.text_content() or "")
    assert page.evaluate("window.hacked") is None
    assert page.locator(".t").count() == 30
    assert {url for url in each.requested if url} == set()
