"""The bytes and texts of single tokens, and their offsets in a text."""

from codecs import getincrementaldecoder

from slipstream.models.gguf.tokenizer import SPACE_PIECE
from slipstream.models.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_Utf8 = getincrementaldecoder("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level vocabularies.

    Printable bytes are the characters of the same code; the others are mapped to U+0100 and up.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = {chr(byte): byte for byte in printing}
    others = (byte for byte in range(256) if byte not in printing)
    letters.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return letters


_BYTES = _byte_alphabet()


class TokenTexts:
    """The bytes and texts of tokens, with a cache, because logprobs repeat the same tokens.

    Args:
        as_ids: whether `name` returns ids, such as token_id:5, instead of texts.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._bytes: dict[int, bytes] = {}

    def content(self, token_id: int) -> bytes:
        """The bytes of a token, which may be part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find(token_id)
        return known

    def text(self, token_id: int) -> str:
        """The text of a token; part of a character is written as its bytes."""
        content = self.content(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def name(self, token_id: int) -> str:
        """The name of a token in logprobs."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out if `skip_special_tokens` is set."""
        return token_id in self._tokenizer.special_token_ids

    def decoded(self, token_id: int) -> str:
        """The text of a token alone: some tokenizers drop the leading space of a text."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _find(self, token_id: int) -> bytes:
        text = self.decoded(token_id)
        spelling = self._tokenizer.id_to_token(token_id)
        if spelling is None or self.is_special(token_id):
            return text.encode()
        if all(letter in _BYTES for letter in spelling):
            content = bytes(_BYTES[letter] for letter in spelling)
            if content.decode(errors="replace") == text:
                return content
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes([int(spelling[3:5], 16)])
        has_space = SPACE_PIECE in spelling
        return (spelling.replace(SPACE_PIECE, " ") if has_space else text).encode()


class TokenReader:
    """Decodes the tokens of one text one by one.

    Args:
        skip_special: whether special tokens are left out of the text.
        offset: number of characters before the first token.
    """

    def __init__(self, texts: TokenTexts, skip_special: bool, offset: int = 0) -> None:
        self._texts, self._skip_special = texts, skip_special
        self._decoder = _Utf8("replace")
        self._at_start = True
        self.offset = offset

    def take(self, token_id: int) -> str:
        """The text that a token adds; a character is added by the token that completes it."""
        if self._skip_special and self._texts.is_special(token_id):
            return ""
        content = self._texts.content(token_id)
        if self._at_start and content.startswith(b" "):
            content = self._texts.decoded(token_id).encode()
        self._at_start = False
        added = self._decoder.decode(content)
        self.offset += len(added)
        return added
