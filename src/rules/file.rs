//! Stand-in for the file reader, so that the command line can be built.

/// A file as read.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Its path, as shown.
    pub name: String,
    /// What it holds.
    pub text: String,
}
