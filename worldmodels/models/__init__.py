"""The networks around a core, one a file."""
