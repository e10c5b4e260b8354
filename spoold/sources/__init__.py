"""Completed environments out of a rollout database."""
