from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from engine.launch.model_configs import (
    CONFIG_FORMATS,
    ENGINE_CLIENT_REQUEST,
    REPOSITORY,
    TOKENIZE_REQUEST,
    UNARY_REQUEST,
    ConfigFormat,
    configurations,
    write,
)
from engine.service.sampling_inputs import REFUSED


def parse(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_repository_is_up_to_date() -> None:
    files = {str(p.relative_to(REPOSITORY)) for p in REPOSITORY.rglob("*.pbtxt")}
    assert files == set(configurations())
    for path, text in configurations().items():
        found = (REPOSITORY / path).read_text(encoding="utf-8")
        assert found == text, f"{path}: run python -m engine.launch.model_configs"


def test_it_is_written_as_it_is_told(tmp_path: Path) -> None:
    write(tmp_path)
    written = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.pbtxt")}
    assert written == configurations()


# Inputs of the engine alone, and of the tokenizer alone.
ALONE = {tensor.name for tensor in (*ENGINE_CLIENT_REQUEST, *TOKENIZE_REQUEST)}


@pytest.mark.parametrize("form", CONFIG_FORMATS)
def test_the_ensemble_connects_every_tensor_of_its_steps(form: ConfigFormat) -> None:
    models = {
        path.split("/")[0]: parse(text)
        for path, text in configurations().items()
        if path.endswith(form.file)
    }
    ensemble = models["ensemble"]
    known = {tensor.name: tensor for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = models[step.model_name]
        for tensor in model.input:
            if tensor.name not in step.input_map:
                assert tensor.name in ALONE
                continue
            source = known[step.input_map[tensor.name]]
            assert (source.data_type, source.dims) == (tensor.data_type, tensor.dims)
        outputs = {tensor.name: tensor for tensor in model.output}
        known.update({name: outputs[key] for key, name in step.output_map.items()})
    for tensor in ensemble.output:
        assert (known[tensor.name].data_type, known[tensor.name].dims) == (
            tensor.data_type,
            tensor.dims,
        )


def test_what_is_declared_to_be_refused_is_refused() -> None:
    """And nothing is refused that no client can send."""
    declared = {tensor.name for tensor in (*UNARY_REQUEST, *ENGINE_CLIENT_REQUEST)}
    assert set(REFUSED) <= declared
