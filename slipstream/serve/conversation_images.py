"""The images of a conversation."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import UsageError
from slipstream.engine.media import MOST_PIXELS_TOGETHER
from slipstream.serve.errors import bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.chat import ImagePart, Message

if TYPE_CHECKING:
    from PIL.Image import Image


def read_images(
    service: ModelService, messages: Sequence[Message], options: Mapping[str, Any] | None = None
) -> list["Image"]:
    """Load the images of the messages, in order; slow, as it may download them.

    Args:
        options: of the model's image processor; they precede the server's.

    Raises:
        ApiError: an image cannot be read, there are more than the model supports, or options are
            wrong.
    """
    options = options or {}
    try:
        service.engine.images.require_options(options, may_exceed=False)
    except UsageError as error:
        raise bad_request(str(error), "mm_processor_kwargs") from error
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
            service.engine.images.require_readable(images[-1], options)
        except UsageError as error:
            raise bad_request(f"{where}: {error}", "messages") from error
        left -= images[-1].width * images[-1].height
    return images
