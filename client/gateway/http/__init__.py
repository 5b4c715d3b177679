"""HTTP responses and streams of all routes, and their part of the OpenAPI document."""
