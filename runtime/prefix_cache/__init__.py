"""Keeps the states of prompts that may come again: on the device, in the host's memory and on disk."""
