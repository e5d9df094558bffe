"""Images that a message comes with: dropped or chosen, shown, removed, sent as data URLs."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from tests.serve.page.conftest import OpenPage, wait_until
from tests.serve.page.fake_server import FakeServer

if TYPE_CHECKING:
    from playwright.sync_api import Page


def stored(colour: str = "orange") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (96, 64), colour).save(file, "PNG")
    return file.getvalue()


def chosen(name: str, content: bytes, kind: str = "image/png") -> Any:
    return {"name": name, "mimeType": kind, "buffer": content}


def drop(page: "Page", content: bytes, name: str = "a.png", kind: str = "image/png") -> None:
    page.evaluate(
        """([data, name, kind]) => {
            const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([bytes], name, {type: kind}));
            for (const it of ["dragenter", "dragover", "drop"]) {
                const options = {dataTransfer, bubbles: true, cancelable: true};
                document.body.dispatchEvent(new DragEvent(it, options));
            }
        }""",
        [base64.b64encode(content).decode(), name, kind],
    )


def test_images_are_shown_removed_and_sent(
    open_page: OpenPage, server: FakeServer, tmp_path: Path
) -> None:
    server.has_template, server.max_images = True, 3
    page = open_page()
    page.wait_for_selector("#image-add")
    drop(page, stored())
    page.wait_for_selector("#images img")
    page.set_input_files("#image-files", [chosen("b.png", stored("teal"))])
    wait_until(page, "document.querySelectorAll('#images img').length === 2")
    wait_until(page, "[...document.querySelectorAll('#images img')].every((it) => it.naturalWidth)")
    page.screenshot(path=tmp_path / "composer.png")
    page.get_by_label("Remove a.png").click()
    assert page.locator("#images img").get_attribute("alt") == "b.png"
    page.fill("#prompt", "What is this?")
    page.click("#run")
    page.wait_for_selector(".replays")
    url = f"data:image/png;base64,{base64.b64encode(stored('teal')).decode()}"
    seen = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": seen}]
    assert page.locator("#images").is_hidden()
    assert page.locator(".question img").get_attribute("src") == url
    page.fill("#prompt", "And now?")
    page.click("#run")
    wait_until(page, "document.querySelectorAll('.replays').length === 2")
    first, _, second = server.bodies[-1]["messages"]
    assert (first["content"], second["content"]) == (seen, "And now?")
    drop(page, stored())
    page.wait_for_selector("#images img")
    page.fill("#prompt", "")
    page.click("#run")
    wait_until(page, "document.querySelectorAll('.replays').length === 3")
    assert [it["type"] for it in server.bodies[-1]["messages"][-1]["content"]] == ["image_url"]


def test_what_cannot_be_sent_is_said(open_page: OpenPage, server: FakeServer) -> None:
    server.has_template, server.max_images = True, 1
    page = open_page()
    page.wait_for_selector("#image-add")
    said = page.locator("#prompt-error")
    drop(page, b"%PDF", "a.pdf", "application/pdf")
    assert said.text_content() == "a.pdf is no PNG, JPEG, WebP, GIF or BMP."
    for _ in range(2):
        drop(page, stored())
        page.wait_for_selector("#images img")
    wait_until(page, "document.getElementById('prompt-error').textContent.includes('at most 1 ')")
    assert page.locator("#images img").count() == 1
    page.check("input[value=completion]", force=True)
    assert page.locator("#images").is_hidden()
    assert page.locator("#image-add").is_hidden()
    drop(page, stored())
    assert said.text_content() == "Images go with a message: choose Chat first."


def test_a_model_that_reads_text_alone_says_so(open_page: OpenPage, server: FakeServer) -> None:
    server.has_template = True
    page = open_page()
    assert page.locator("#image-add").is_hidden()
    drop(page, stored())
    assert page.locator("#prompt-error").text_content() == "This model reads text only, no images."
    assert page.locator("#images").is_hidden()


def test_a_message_that_is_refused_keeps_its_images(
    open_page: OpenPage, server: FakeServer
) -> None:
    server.has_template, server.max_images = True, 1
    page = open_page()
    page.wait_for_selector("#image-add")
    drop(page, stored())
    page.wait_for_selector("#images img")
    server.key = "secret"
    page.fill("#prompt", "What is this?")
    page.click("#run")
    page.wait_for_selector("#key-dialog[open]")
    assert page.locator("#images img").count() == 1
    assert page.input_value("#prompt") == "What is this?"
