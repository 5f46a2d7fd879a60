"""`python -m ecospec_predictor.health`: exit code 0 when the predictor on this machine answers; for probes of containers.

Reads the server's own settings from the environment, so it knows port and TLS files. With TLS it trusts tls_client_ca and shows the
server's own certificate, which the same authority has signed and which must be good for clients, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ecospec_proto import predictor_pb2

from .errors import SettingsError
from .settings import Settings, load_settings

SERVICE_NAME = predictor_pb2.DESCRIPTOR.services_by_name["ExpertPredictorService"].full_name
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
TIMEOUT_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when it serves, 1 when not, 2 for a wrong setting; what is wrong goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m ecospec_predictor.health", description=__doc__)
    parser.add_argument(
        "--live", action="store_true", help="ask whether the process answers, not whether its model has warmed up"
    )
    parser.add_argument(
        "--server-name", default="localhost", help="a name in the server's certificate (default localhost)"
    )
    options = parser.parse_args(arguments)
    try:
        # Of model_dir nothing is needed here, and it may be given to the server as an option.
        settings = load_settings({"model_dir": "."})
        problem = ask(settings, "" if options.live else SERVICE_NAME, options.server_name)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def ask(settings: Settings, service: str, server_name: str) -> str:
    """Empty when the service says SERVING, else why not. Raises SettingsError for TLS files that cannot be used."""
    host = ANYWHERE.get(settings.host, f"[{settings.host}]" if ":" in settings.host else settings.host)
    where = f"{host}:{settings.port}"
    with _channel(settings, where, server_name) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return f"The predictor at {where} cannot be asked: {error.code().name}, {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return f"The predictor at {where} says {name} for '{service}'."


def _channel(settings: Settings, where: str, server_name: str) -> grpc.Channel:
    certificate, key, authority = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None or key is None:
        return grpc.insecure_channel(where)
    if authority is None:
        raise SettingsError(
            "Setting tls_client_ca is missing, and without it this check knows no authority to trust; give it, or check the port alone."
        )
    try:
        credentials = grpc.ssl_channel_credentials(authority.read_bytes(), key.read_bytes(), certificate.read_bytes())
    except OSError as error:
        raise SettingsError(f"A TLS file cannot be read ({error}); the server's own files are needed.") from None
    return grpc.secure_channel(where, credentials, options=[("grpc.ssl_target_name_override", server_name)])


if __name__ == "__main__":
    sys.exit(main())
