"""The operations of a control plane, and the gate of every call, with HTTP or without."""
