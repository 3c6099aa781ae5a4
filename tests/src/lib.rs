//! What the integration tests share.
#![allow(clippy::expect_used, reason = "a test that cannot be set up has failed")]

pub mod built;
