"""Authentication, tenants, quotas and size limits of the gateway."""
