"""What travels between pipeline stages, beside Megatron's own schedules (which stay as they are)."""
