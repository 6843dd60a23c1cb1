"""Agents whose memory is a core."""
