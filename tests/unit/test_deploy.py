"""What must hold in every Kubernetes overlay of deploy/k8s."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed_settings import orchestrator_settings, predictor_settings, start_seconds
from kustomize import build, merge
from published_configs import DEEPSEEK_V31, PUBLISHED_BYTES, QWEN3_235B

from ecospec_orchestrator.engine.tensorrt_llm.facts import facts_of
from ecospec_orchestrator.engine.tensorrt_llm.launcher import check_memory, memory_need, plan_launch
from ecospec_orchestrator.engine.torch.demo import WEIGHT_BYTES

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"
OVERLAYS = sorted(path.parent.name for path in K8S.glob("overlays/*/kustomization.yaml"))
NAME = "app.kubernetes.io/name"
SHUTDOWN_SECONDS = 10  # of a server after its drain
STORE = "rediss://ecospec-redis:6379/0?ssl_ca_certs=/etc/ecospec/redis/ca.crt"
H200_BYTES, H200_GB_PER_SECOND = 141_000_000_000, 4800
UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# overlay -> its target's published configuration, and the bytes of its weights in bfloat16
TARGETS = {
    "h200": (QWEN3_235B, PUBLISHED_BYTES["qwen3"]),
    "multi-node": ({k: v for k, v in DEEPSEEK_V31.items() if k != "quantization_config"}, 1_369_000_000_000),
}
Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template of an overlay; every one of ours has one container."""

    owner: str
    labels: dict[str, str]
    spec: Object

    @property
    def container(self) -> Object:
        (container,) = self.spec["containers"]
        return container

    @property
    def environment(self) -> dict[str, str]:
        """A value from a Secret is unknown here: a word stands for it."""
        return {item["name"]: item.get("value", "secret") for item in self.container.get("env", [])}

    @property
    def settings(self) -> Any:
        read = predictor_settings if self.container["name"] == "predictor" else orchestrator_settings
        return read({name: value for name, value in self.environment.items() if name.startswith("ECOSPEC_")})


@lru_cache
def overlay(name: str) -> list[Object]:
    return build(K8S / "overlays" / name)


def of_kind(name: str, *kinds: str) -> list[Object]:
    return [made for made in overlay(name) if made["kind"] in kinds]


def pods(name: str) -> Iterator[Pod]:
    for made in of_kind(name, "Deployment", "StatefulSet"):
        template = made["spec"]["template"]
        yield Pod(made["metadata"]["name"], template["metadata"]["labels"], template["spec"])
    for made in of_kind(name, "LeaderWorkerSet"):
        for part in ("leaderTemplate", "workerTemplate"):
            template = made["spec"]["leaderWorkerTemplate"][part]
            group = {"leaderworkerset.sigs.k8s.io/name": made["metadata"]["name"]}  # which its controller adds
            yield Pod(f"{made['metadata']['name']} {part}", template["metadata"]["labels"] | group, template["spec"])


EVERY_POD = [pytest.param(pod, id=f"{name}: {pod.owner}") for name in OVERLAYS for pod in pods(name)]
OURS = [param for param in EVERY_POD if param.values[0].container["name"] in ("orchestrator", "predictor")]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """A LabelSelector, of which In is the only operator that is used."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        {"In": labels.get(rule["key"]) in rule["values"]}[rule["operator"]]
        for rule in selector.get("matchExpressions", [])
    )


def test_all_overlays_are_there() -> None:
    expected = ["autoscaling", "cpu-demo", "dra", "h200", "inference-gateway", "monitoring", "multi-node"]
    assert expected == OVERLAYS
    used = {
        name
        for path in K8S.glob("overlays/*/kustomization.yaml")
        for name in yaml.safe_load(path.read_text()).get("components", [])
    }
    assert {Path(name).name for name in used} == {
        path.parent.name for path in K8S.glob("components/*/kustomization.yaml")
    }


@pytest.mark.parametrize("name", OVERLAYS)
def test_our_reading_is_kubectls(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; make check-deploy brings one.")
    done = subprocess.run(["kubectl", "kustomize", K8S / "overlays" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [canonical(made) for made in sorted_objects(list(yaml.safe_load_all(done.stdout)))] == [
        canonical(made) for made in sorted_objects(overlay(name))
    ]


def sorted_objects(objects: list[Object]) -> list[Object]:
    return sorted(objects, key=lambda made: (made["kind"], made["metadata"]["name"]))


def canonical(value: Any) -> Any:
    """Without the order of lists whose items have names, which patches may change."""
    if isinstance(value, dict):
        return {key: canonical(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        inner = [canonical(item) for item in value]
        return sorted(inner, key=json.dumps) if all(isinstance(item, dict) for item in inner) else inner
    return value


def test_a_merge_patch_merges_by_name_and_removes_by_null() -> None:
    target = {"env": [{"name": "a", "value": "1"}], "limits": {"cpu": 1, "memory": 2}, "args": ["x", "y"]}
    merge(target, {"env": [{"name": "b"}, {"name": "a", "value": "2"}], "limits": {"cpu": None}, "args": ["z"]})
    assert target == {"env": [{"name": "b"}, {"name": "a", "value": "2"}], "limits": {"memory": 2}, "args": ["z"]}


@pytest.mark.parametrize("pod", EVERY_POD)
def test_pods_are_restricted(pod: Pod) -> None:
    of_pod, of_container = pod.spec["securityContext"], pod.container["securityContext"]
    assert of_pod["runAsNonRoot"] is True and of_pod["runAsUser"] > 0 and of_pod["runAsGroup"] > 0
    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert of_container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec)
    assert pod.spec["automountServiceAccountToken"] is (pod.owner == "ecospec-endpoint-picker")
    assert pod.spec["enableServiceLinks"] is False
    kinds = {key for volume in pod.spec.get("volumes", []) for key in volume if key != "name"}
    assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}
    for volume in pod.spec.get("volumes", []):
        assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), volume
        assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440


@pytest.mark.parametrize("pod", EVERY_POD)
def test_images_have_a_version_and_resources_are_named(pod: Pod) -> None:
    _, colon, tag = pod.container["image"].rpartition(":")
    assert colon and "/" not in tag and tag != "latest" and any(letter.isdigit() for letter in tag)
    requests, limits = pod.container["resources"]["requests"], pod.container["resources"]["limits"]
    assert {"cpu", "memory", "ephemeral-storage"} <= set(requests)
    assert {"memory", "ephemeral-storage"} <= set(limits) and "cpu" not in limits  # throttling stretches every step
    assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")


@pytest.mark.parametrize("pod", EVERY_POD)
def test_every_mount_has_its_volume_and_only_the_mounts_can_be_written(pod: Pod) -> None:
    mounted = [mount["name"] for mount in pod.container.get("volumeMounts", [])]
    claimed = [volume["name"] for volume in pod.spec.get("volumes", [])]
    assert len(set(mounted)) == len(mounted)
    assert set(mounted) - set(claimed) <= {"data"}  # of Redis's volumeClaimTemplates
    assert set(claimed) <= set(mounted)
    if pod.container["image"].startswith("ecospec-"):
        assert {"/var/cache/ecospec", "/tmp"} <= {mount["mountPath"] for mount in pod.container["volumeMounts"]}


@pytest.mark.parametrize("pod", EVERY_POD)
def test_probes_do_not_load_what_they_ask(pod: Pod) -> None:
    assert {"startupProbe", "livenessProbe"} <= set(pod.container)
    assert ("readinessProbe" in pod.container) == ("ports" in pod.container)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = pod.container.get(kind, {"exec": {}, "periodSeconds": 60})
        (how,) = {"httpGet", "grpc", "exec", "tcpSocket"} & set(probe)
        path = probe["httpGet"]["path"] if how == "httpGet" else ""
        assert probe["periodSeconds"] >= (15 if path == "/ready" else 5)
        if kind == "livenessProbe":
            assert path != "/ready"  # a full server is not a dead one
        # The kubelet's own gRPC probe speaks no TLS.
        assert not (how == "grpc" and "ECOSPEC_PREDICTOR_SERVICE_TLS_KEY" in pod.environment)


@pytest.mark.parametrize("pod", OURS)
def test_settings_are_known_and_ports_match_them(pod: Pod) -> None:
    settings = pod.settings
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    if pod.container["name"] == "predictor":
        assert ports == {"grpc": settings.port, "metrics": settings.metrics_port}
        assert settings.host == settings.metrics_host == "0.0.0.0"
        assert settings.allow_plaintext != (settings.tls_client_ca is not None)
        drain_seconds = settings.grace_seconds
    else:
        assert ports == {"http": settings.port} and settings.host == "0.0.0.0"
        assert settings.keys == ("secret",)
        assert pod.container.get("command") or pod.container["args"] == ["serve"]
        assert settings.max_request_seconds > 0  # so that a stop has an end
        startup = pod.container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= start_seconds(settings)
        drain_seconds = settings.drain_limit_seconds
    sleep_seconds = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod.spec["terminationGracePeriodSeconds"] >= sleep_seconds + drain_seconds + SHUTDOWN_SECONDS
    assert pod.spec["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].items() <= pod.labels.items()


@pytest.mark.parametrize("name", OVERLAYS)
def test_orchestrators_find_their_predictor_and_their_store(name: str) -> None:
    settings = {
        pod.container["name"]: pod.settings
        for pod in pods(name)
        if pod.container["name"] in ("orchestrator", "predictor")
    }
    services = {made["metadata"]["name"]: made["spec"]["ports"][0]["port"] for made in of_kind(name, "Service")}
    host, _, port = settings["orchestrator"].predictor_address.rpartition(":")
    assert services[host] == int(port)
    assert (settings["orchestrator"].predictor_tls_ca is None) == settings["predictor"].allow_plaintext
    stores = {each.state_store_url.get_secret_value() for each in settings.values()}
    assert stores == ({STORE} if "ecospec-redis" in services else {""})
    for pod in pods(name):
        authority = [m["mountPath"] for m in pod.container.get("volumeMounts", []) if m["name"] == "redis-authority"]
        asks = pod.container["name"] in settings and "ecospec-redis" in services
        assert authority == ([str(Path(STORE.partition("=")[2]).parent)] if asks else [])
    assert services.get("ecospec-redis", 6379) == 6379


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_and_budgets_select_pods(name: str) -> None:
    for made in of_kind(name, "Service"):
        (pod,) = (pod for pod in pods(name) if selects({"matchLabels": made["spec"]["selector"]}, pod.labels))
        names = {port["name"] for port in pod.container["ports"]}
        assert {port["targetPort"] for port in made["spec"]["ports"]} <= names
    budgets = [made["spec"] for made in of_kind(name, "PodDisruptionBudget")]
    for pod in pods(name):
        if pod.container["name"] in ("orchestrator", "predictor", "endpoint-picker"):
            (budget,) = (each for each in budgets if selects(each["selector"], pod.labels))
            assert budget["maxUnavailable"] == 1  # with one replica, minAvailable would keep a node from being drained


def callers(name: str, pod: Pod, port: int) -> list[Object]:
    """The peers that network policies let in to a port of a pod."""
    return [
        peer
        for made in of_kind(name, "NetworkPolicy")
        if selects(made["spec"]["podSelector"], pod.labels)
        for rule in made["spec"].get("ingress", [])
        if "ports" not in rule or port in [each["port"] for each in rule["ports"]]
        for peer in rule["from"]
    ]


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_talks_unless_a_policy_says_so(name: str) -> None:
    policies = of_kind(name, "NetworkPolicy")
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in [made["spec"] for made in policies]
    everyone = list(pods(name))
    for made in policies:
        assert all(rule["from"] for rule in made["spec"].get("ingress", []))
        assert any(selects(made["spec"]["podSelector"], pod.labels) for pod in everyone), made["metadata"]["name"]
    for pod in everyone:
        for port in [each["containerPort"] for each in pod.container.get("ports", [])]:
            peers = callers(name, pod, port)
            if port == 50051:
                assert peers == [{"podSelector": {"matchLabels": {NAME: "ecospec-orchestrator"}}}]
            if port == 9101:  # nobody, where nothing monitors
                prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
                assert peers == ([prometheus] if of_kind(name, "PodMonitor") else [])
            if port == 6379:
                assert all("podSelector" in peer and "namespaceSelector" not in peer for peer in peers)
            assert {} not in peers
    # Who may call is also allowed to: the orchestrator's way out to the predictor.
    (orchestrator,) = (pod for pod in everyone if pod.container["name"] == "orchestrator")
    out = [
        (peer, rule["ports"][0]["port"])
        for made in policies
        if selects(made["spec"]["podSelector"], orchestrator.labels)
        for rule in made["spec"].get("egress", [])
        for peer in rule.get("to", [])
        if "ports" in rule
    ]
    assert ({"podSelector": {"matchLabels": {NAME: "ecospec-predictor"}}}, 50051) in out


@pytest.mark.parametrize("name", OVERLAYS)
def test_one_restricted_namespace_and_no_secret_in_the_repository(name: str) -> None:
    (namespace,) = of_kind(name, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for made in overlay(name):
        if made["kind"] != "Namespace":
            assert made["metadata"]["namespace"] == namespace["metadata"]["name"], made["metadata"]
    assert not of_kind(name, "Secret")
    ids = [(made["kind"], made["metadata"]["name"]) for made in overlay(name)]
    assert len(set(ids)) == len(ids)


def test_accelerators() -> None:
    gpus = {pod.owner: pod.container["resources"]["limits"].get("nvidia.com/gpu") for pod in pods("h200")}
    assert gpus == {"ecospec-orchestrator": "8", "ecospec-predictor": "1", "ecospec-redis": None}
    (workers,) = of_kind("multi-node", "LeaderWorkerSet")
    assert workers["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert "ecospec-orchestrator" not in [made["metadata"]["name"] for made in of_kind("multi-node", "Deployment")]
    templates = {made["metadata"]["name"]: made["spec"]["spec"] for made in of_kind("dra", "ResourceClaimTemplate")}
    for pod in pods("dra"):
        assert "nvidia.com/gpu" not in pod.container["resources"]["limits"]
        for claim in pod.spec.get("resourceClaims", []):
            assert claim["resourceClaimTemplateName"] in templates
            assert {"name": claim["name"]} in pod.container["resources"]["claims"]


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_the_demo_fits_its_memory() -> None:
    (pod,) = (pod for pod in pods("cpu-demo") if pod.container["name"] == "orchestrator")
    resources = pod.container["resources"]
    assert WEIGHT_BYTES < bytes_of(resources["requests"]["memory"]) <= bytes_of(resources["limits"]["memory"])


@pytest.mark.parametrize("name", TARGETS)
def test_targets_fit_their_gpus_and_their_claim(name: str, tmp_path: Path) -> None:
    config, weight_bytes = TARGETS[name]
    (pod,) = (pod for pod in pods(name) if pod.container["name"] == "orchestrator")
    settings = pod.settings
    assert settings.engine == "tensorrt-llm"
    gpus = sum(
        int(each.container["resources"]["limits"]["nvidia.com/gpu"])
        for each in pods(name)
        if "tensorrt" in each.container["image"]
    )
    assert settings.tensor_parallel_size == gpus
    assert settings.memory_bandwidth_gb_per_second == gpus * H200_GB_PER_SECOND
    if settings.drafter != "mtp":  # a directory, which is not here
        settings = settings.model_copy(update={"drafter": str(tmp_path)})
    facts = facts_of(config, name, weight_bytes)
    plan = plan_launch(settings, facts)
    assert plan.shape == ("chain" if settings.drafter == "mtp" else "tree")
    assert plan.selects == (settings.token_table is not None)
    nodes = sum("tensorrt" in each.container["image"] for each in pods(name))
    assert (plan.arguments.get("orchestrator_type") == "ray") == (nodes > 1)
    check_memory(memory_need(settings, facts, plan), H200_BYTES)
    (claim,) = of_kind(name, "PersistentVolumeClaim")
    assert bytes_of(claim["spec"]["resources"]["requests"]["storage"]) > 1.1 * weight_bytes


def test_scaled_deployments_name_no_replicas() -> None:
    scaled = [
        made["spec"]["scaleTargetRef"]["name"]
        for made in of_kind("autoscaling", "ScaledObject", "HorizontalPodAutoscaler")
    ]
    deployments = {made["metadata"]["name"]: made["spec"] for made in of_kind("autoscaling", "Deployment")}
    assert sorted(scaled) == sorted(deployments)
    assert all("replicas" not in spec for spec in deployments.values())


def test_monitors_find_the_metrics_and_dashboards_are_all_there() -> None:
    for made in of_kind("monitoring", "PodMonitor"):
        (pod,) = (pod for pod in pods("monitoring") if selects(made["spec"]["selector"], pod.labels))
        (endpoint,) = made["spec"]["podMetricsEndpoints"]
        (number,) = (port["containerPort"] for port in pod.container["ports"] if port["name"] == endpoint["port"])
        scrapers = [peer.get("namespaceSelector", {}).get("matchLabels") for peer in callers("monitoring", pod, number)]
        assert {"kubernetes.io/metadata.name": "monitoring"} in scrapers
    maps = of_kind("monitoring", "ConfigMap")
    assert {"grafana_dashboard": "1"} in [made["metadata"]["labels"] for made in maps]
    shown = {name for made in maps for name in made["data"] if name.endswith(".json")}
    assert shown == {path.name for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}


def test_the_gateways_picker_reads_metrics_that_are_exported() -> None:
    ledger = (ROOT / "services/orchestrator/ecospec_orchestrator/accounting/ledger.py").read_text(encoding="utf-8")
    (picker,) = (pod for pod in pods("inference-gateway") if pod.container["name"] == "endpoint-picker")
    names = [argument.partition("=")[2] for argument in picker.container["args"] if "-metric=ecospec_" in argument]
    assert len(names) == 2
    assert all(f'"{name.removeprefix("ecospec_")}"' in ledger for name in names)
    (pool,) = of_kind("inference-gateway", "InferencePool")
    (orchestrator,) = (pod for pod in pods("inference-gateway") if selects(pool["spec"]["selector"], pod.labels))
    assert pool["spec"]["targetPorts"] == [{"number": orchestrator.settings.port}]


def test_the_operators_rules_are_prometheus_own() -> None:
    spec = importlib.util.spec_from_file_location("write_rules", K8S / "write_rules.py")
    assert spec is not None and spec.loader is not None
    write_rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write_rules)
    assert write_rules.OUT.read_text(encoding="utf-8") == write_rules.render()
    jobs = {made["metadata"]["name"]: made["spec"]["jobLabel"] for made in of_kind("monitoring", "PodMonitor")}
    assert jobs == {"ecospec-orchestrator": NAME, "ecospec-predictor": NAME}


def test_what_an_overlay_needs_is_documented() -> None:
    text = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
    for name in OVERLAYS:
        assert f"| `{name}` |" in text
        for pod in pods(name):
            secrets = {volume["secret"]["secretName"] for volume in pod.spec.get("volumes", []) if "secret" in volume}
            for item in pod.container.get("env", []):
                secrets |= {item["valueFrom"]["secretKeyRef"]["name"]} if "valueFrom" in item else set()
            assert all(secret in text for secret in secrets), secrets
