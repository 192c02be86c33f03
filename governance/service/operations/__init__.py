"""The operations of a control plane, and the one gate that every call of them passes, with HTTP or without."""
