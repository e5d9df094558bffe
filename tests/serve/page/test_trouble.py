"""What the page says and does when something goes wrong, or is stopped."""

from tests.serve.page.conftest import OpenPage, wait_until
from tests.serve.page.fake_server import FakeServer


def test_an_empty_prompt_is_not_sent(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.fill("#prompt", "  \n")
    page.click("#run")
    assert page.locator("#prompt-error").text_content() == "Write a prompt first."
    assert page.locator("#prompt[aria-invalid=true]:focus").count() == 1
    page.fill("#prompt", "x")
    assert page.locator("#prompt-error").text_content() == ""
    page.fill("#prompt", "")
    page.click("#run")
    page.click("text=Chat")  # brings an example
    assert page.locator("#prompt[aria-invalid=true]").count() == 0
    assert server.bodies == []


def test_a_setting_out_of_range_is_not_sent(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page(width=390, height=844)
    page.locator("#max_tokens").evaluate("field => { field.value = '0' }")
    page.click("#run")
    assert page.locator("#max_tokens:focus").count() == 1  # though the settings were folded
    assert server.bodies == []


def test_escape_stops_a_stream_and_the_server_learns_of_it(
    open_page: OpenPage, server: FakeServer
) -> None:
    page = open_page()
    page.fill("#prompt", "#endless")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".text .tok.bonus")
    assert page.locator("#run").inner_text().startswith("Stop")
    page.keyboard.press("Escape")
    page.wait_for_selector(".replays")
    assert "stopped" in (page.locator(".pane-state").text_content() or "")
    assert page.locator("#run").inner_text().startswith("Run")
    assert page.locator("#notice").is_hidden()
    assert (page.locator("#announcer").text_content() or "").startswith("Stopped.")
    for _ in range(100):
        if server.num_gone:
            break
        page.wait_for_timeout(100)
    assert server.num_gone == 1


def test_the_stop_button_stops(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.fill("#prompt", "#endless")
    page.click("#run", click_count=2)  # a double click starts, and does not stop at once
    page.wait_for_selector(".text .tok.bonus")
    page.wait_for_timeout(350)
    page.click("#run")
    page.wait_for_selector(".replays")
    count = page.locator(".tok").count()
    page.wait_for_timeout(50)
    assert page.locator(".tok").count() == count


def test_a_refused_field_is_named_and_marked(open_page: OpenPage) -> None:
    page = open_page(width=390, height=844)
    page.fill("#prompt", "#wrong")
    page.click("#run")
    notice = page.locator("#notice")
    notice.wait_for()
    assert "max_tokens must be at most 2048" in notice.inner_text()
    assert "Try again" not in notice.inner_text()  # it would be refused again
    assert page.locator("#max_tokens").get_attribute("aria-invalid") == "true"
    assert page.locator("#max_tokens").is_visible()
    page.fill("#max_tokens", "100")
    assert page.locator("#max_tokens").get_attribute("aria-invalid") is None
    page.click("text=Dismiss")
    assert notice.is_hidden()


def test_a_busy_server_is_asked_again_on_demand(open_page: OpenPage, server: FakeServer) -> None:
    page = open_page()
    page.check("input[value=chat]", force=True)
    page.fill("#prompt", "#busy")
    page.click("#run")
    notice = page.locator("#notice")
    notice.wait_for()
    assert "The server is busy" in notice.inner_text()
    assert "wait 3 s" in notice.inner_text()
    assert page.input_value("#prompt") == "#busy"  # not lost
    assert page.locator(".turn").count() == 0
    page.fill("#prompt", "calm")
    page.click("text=Try again")
    page.wait_for_selector(".replays")
    assert notice.is_hidden()
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["#busy", "calm"]


def test_an_answer_that_breaks_off_keeps_what_came(open_page: OpenPage) -> None:
    page = open_page()
    for word, title in [("#broken", "The answer broke off"), ("#failed", "The server failed")]:
        page.fill("#prompt", word)
        page.click("#run")
        page.wait_for_selector(".replays")
        assert title in page.locator("#notice").inner_text()
        assert page.locator(".tok").count() > 5
        assert "stopped" in (page.locator(".pane-state").text_content() or "")


def test_a_server_that_is_gone(open_page: OpenPage) -> None:
    page = open_page()
    page.route("**/v1/**", lambda route: route.abort())
    page.click("#run")
    page.wait_for_selector("#server[data-state=failed]")
    assert "No answer from the server" in page.locator("#notice").inner_text()
    page.unroute_all()
    page.click("text=Try again")
    page.wait_for_selector("#server[data-state=ready]")
    page.wait_for_selector(".replays")


def test_a_key_is_asked_for_and_kept_in_memory_only(
    open_page: OpenPage, server: FakeServer
) -> None:
    server.key = "a-secret"
    page = open_page(ready=False)
    page.wait_for_selector("#key-dialog[open]")
    page.press("#key", "Enter")
    assert page.locator("#key-error").text_content() == "Enter a key, or cancel."
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    wait_until(page, "document.getElementById('key-error').textContent.includes('not accept')")
    page.fill("#key", server.key)
    page.press("#key", "Enter")
    page.wait_for_selector("#server[data-state=ready]")
    page.click("#run")
    page.wait_for_selector(".replays")
    kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    assert kept == [0, 0, ""]
    assert page.input_value("#key") == ""
    page.reload()
    page.wait_for_selector("#key-dialog[open]")
    page.keyboard.press("Escape")
    assert page.locator("#server-text").text_content() == "needs an API key"
    page.click("#key-open")
    assert page.locator("#key:focus").count() == 1
