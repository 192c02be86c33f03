"""The conformance kit: what every engine adapter, ours or a third party's, must pass."""
