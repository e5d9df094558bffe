"""The images of a conversation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.core.errors import UsageError
from slipstream.engine.media import MOST_PIXELS_TOGETHER
from slipstream.serve.errors import bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.chat import ImagePart, Message

if TYPE_CHECKING:
    from PIL.Image import Image


def read_images(service: ModelService, messages: Sequence[Message]) -> list["Image"]:
    """Load the images of the messages, in order; slow, as it may download them.

    Raises:
        ApiError: an image cannot be read, or there are more than the model supports.
    """
    parts = [
        (f"messages[{place}].content[{number}]", part)
        for place, message in enumerate(messages)
        if not isinstance(message.content, str)
        for number, part in enumerate(message.content or ())
        if isinstance(part, ImagePart)
    ]
    images: list[Image] = []
    try:
        service.engine.images.require(len(parts))
    except UsageError as error:
        raise bad_request(str(error), "messages") from error
    left = MOST_PIXELS_TOGETHER
    for place, part in parts:
        where = part.where or place
        try:
            images.append(service.engine.media.open(part.image_url.url, left))
            service.engine.images.require_readable(images[-1])
        except UsageError as error:
            raise bad_request(f"{where}: {error}", "messages") from error
        left -= images[-1].width * images[-1].height
    return images
