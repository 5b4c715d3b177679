"""Administration is closed to clients, what they read stays open, configurations are as written."""

from __future__ import annotations

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.launch.server import TritonServer
from tests.server.raw_requests import http_request

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quiet_log")]

ADMINISTRATIVE = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/engine/load"),
    ("POST", "/v2/repository/models/engine/unload"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/models/engine/trace/setting"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("GET", "/v2/cudasharedmemory/status"),
]


@pytest.mark.parametrize(("method", "path"), ADMINISTRATIVE)
def test_administration_is_closed_over_http(server: TritonServer, method: str, path: str) -> None:
    for headers in ({}, {"admin-key": ""}, {"admin-key": "0123456789abcdef"}):
        status, text = http_request(server, method, path, b"{}", headers)
        assert (status, "restricted" in text) == (403, True)


def test_administration_is_closed_over_grpc(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    calls = [
        (stub.RepositoryIndex, service_pb2.RepositoryIndexRequest()),
        (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest(model_name="engine")),
        (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest(model_name="engine")),
        (stub.LogSettings, service_pb2.LogSettingsRequest()),
        (stub.TraceSetting, service_pb2.TraceSettingRequest()),
        (stub.SystemSharedMemoryStatus, service_pb2.SystemSharedMemoryStatusRequest()),
        (stub.SystemSharedMemoryRegister, service_pb2.SystemSharedMemoryRegisterRequest(name="x")),
        (stub.CudaSharedMemoryStatus, service_pb2.CudaSharedMemoryStatusRequest()),
    ]
    for call, message in calls:
        with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
            call(message, timeout=30, metadata=[("triton-grpc-protocol-admin-key", "guess")])


def test_what_clients_read_stays_open(
    server: TritonServer, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    for path in ("/v2", "/v2/models/ensemble", "/v2/models/ensemble/config", "/v2/models/stats"):
        assert http_request(server, "GET", path, None, {})[0] == 200
    assert stub.ModelStatistics(service_pb2.ModelStatisticsRequest(), timeout=30).model_stats


def test_triton_completes_no_configuration_of_our_repository(server: TritonServer) -> None:
    assert "--disable-auto-complete-config" in psutil.Process(server.pid).cmdline()
