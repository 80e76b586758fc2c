"""The four kinds of process: gateway, P (prefill), RLD (relay_decode) and MD (main_decode)."""
