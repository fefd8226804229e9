//! The control plane: an ordinary tokio program, never on the data path.
