"""Fields of the gateway's requests against those of the engine."""

from client.gateway.openai.protocol import ChatRequest
from client.gateway.schemas.sampling import SamplingFields
from client.gateway.schemas.tokens import TokenizeRequest
from engine.request.sampling_params import SamplingParams
from engine.text.chat_parameters import ChatParameters
from engine.validation.unsupported import PARAMETERS

# Fields that each route has in its own form, and what only the gateway asks for.
OF_ROUTES = {"max_tokens", "logprobs", "return_embedding", "return_sections"}


def test_every_sampling_parameter_can_be_reached() -> None:
    assert set(SamplingParams.model_fields) - OF_ROUTES <= set(SamplingFields.model_fields)


def test_every_field_is_known_to_the_engine() -> None:
    others = {"response_format", "cache_salt", "use_beam_search"}
    others |= {
        f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar", "whitespace_pattern")
    }
    known = set(SamplingParams.model_fields) | set(PARAMETERS) | others
    assert set(SamplingFields.model_fields) <= known


def test_the_template_gets_the_same_from_both_routes() -> None:
    fields = set(ChatParameters.__dataclass_fields__)
    assert fields <= set(ChatRequest.model_fields)
    assert fields <= set(TokenizeRequest.model_fields)
