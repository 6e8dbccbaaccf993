"""What people look at: metrics, tables, log lines."""
