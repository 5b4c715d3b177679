"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("trident", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trident")
