"""Properties must hold on any machine, however busy: hypothesis would fail an example that takes more than 0.2 s."""

from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
