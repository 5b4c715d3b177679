"""`/v1/responses`: the tools of a request, and which of them is to be called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from client.gateway.schemas.response_items import TYPE
from client.gateway.schemas.sampling import Fields

# Tools of OpenAI's own: run by its servers, or known to its models alone.
HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)


class FunctionTool(Fields):
    """A function that the model may call. `strict` is off unless it is asked for.

    `defer_loading` has no effect: all functions are in the prompt.
    """

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamespaceTool(Fields):
    """Functions that belong together."""

    type: Literal["namespace"]
    name: str
    description: str
    tools: list[Annotated[FunctionTool, TYPE.only("function")]]


class HostedTool(BaseModel):
    """A tool that this server does not run; what else it says is not looked at."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind(value: Any) -> str:
    found = TYPE.of(value)
    return "<hosted>" if found in HOSTED else f"<{found}>"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_kind),
    TYPE.only("function", "namespace", *HOSTED),
]


class ChosenFunction(Fields):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Fields):
    """The functions that may be called, or of which one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<None>")]
    | Annotated[
        Annotated[ChosenFunction, Tag("<function>")]
        | Annotated[AllowedTools, Tag("<allowed_tools>")],
        TYPE.discriminator,
        TYPE.only("function", "allowed_tools"),
        Tag("<object>"),
    ],
    Discriminator(lambda value: "<object>" if isinstance(value, dict | Fields) else "<None>"),
]
