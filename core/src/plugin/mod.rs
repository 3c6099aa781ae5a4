//! The plugin boundary: entry points, fingerprint, panic guard.
