"""Renders a conversation with the model's chat template, which is untrusted code and runs in a sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from ..errors import BundleError, RequestError

if TYPE_CHECKING:
    import jinja2

Message: TypeAlias = Mapping[str, Any]

MAX_CHARACTERS = 16 << 20  # of one rendered prompt
MAX_ITERATIONS = 1_000_000  # of all range() loops of one rendering
MAX_SECONDS = 10.0


class ChatTemplate:
    """A compiled chat template with the names and filters that Hugging Face templates expect."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        """Compile `source`; raises BundleError if it is not a template."""
        import jinja2

        self._special_tokens = dict(special_tokens)
        self._environment = _make_environment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise BundleError(f"{where}: not a valid chat template: {error}") from None

    def render(self, messages: Sequence[Message], **options: object) -> str:
        """The prompt text for `messages`, ending where the assistant's answer begins.

        `options` are further variables of the template, such as `enable_thinking`. Raises RequestError for a
        malformed conversation, and for one that the template refuses or takes too long over.
        """
        variables = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **options,
            "messages": check_messages(messages),
            "range": _limited_range(),
        }
        deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS or time.monotonic() > deadline:
                    raise RequestError(
                        f"the chat template was stopped after {length} characters; at most {MAX_CHARACTERS} "
                        f"characters and {MAX_SECONDS:g} seconds are allowed"
                    )
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything, by design or by mistake
            raise RequestError(f"the chat template refused the messages: {_one_line(error)}") from None
        return "".join(pieces)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with text parts joined to one string; raises RequestError naming the first that is malformed."""
    if not messages:
        raise RequestError("messages is empty; expected at least one {'role': ..., 'content': ...}")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] is {message!r:.80}; expected {{'role': ..., 'content': ...}}")
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = "".join(_text_of(part, index) for part in content)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{index}].content is {content!r:.80}; expected text")
        checked.append({**message, "content": content})
    return checked


def _text_of(part: object, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RequestError(f"messages[{index}].content holds {part!r:.80}; only parts of type 'text' are supported")


def _make_environment() -> jinja2.Environment:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuses the products and powers with which a few characters make gigabytes."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value, other in ((left, right), (right, left)):
                length = len(value) if isinstance(value, str | list | tuple) else 0
                if operator == "*" and length and isinstance(other, int) and length * other > MAX_CHARACTERS:
                    raise SecurityError("a product is too long")
            if operator == "**" and not (abs(left) < 2**32 and abs(right) < 32):
                raise SecurityError("a power is too large")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is only passed through."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum", None)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: time.strftime(pattern)
    return environment


def _limited_range() -> Callable[..., range]:
    left = MAX_ITERATIONS

    def limited(*args: int) -> range:
        nonlocal left
        numbers = range(*args)
        left -= len(numbers)
        if left < 0:
            raise RequestError(f"the chat template was stopped after {MAX_ITERATIONS} iterations")
        return numbers

    return limited


def _raise_exception(message: object) -> NoReturn:
    raise ValueError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own filter, which escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
