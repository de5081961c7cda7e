//! Stand-in for problems, so that the command line can be built.

use super::file::SourceFile;

/// Something wrong in a file.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Problem {
    /// The file's name.
    pub file: String,
    /// What is wrong.
    pub message: String,
}

/// Everything that is wrong.
#[derive(Clone, Debug)]
pub struct Problems(pub Vec<Problem>);

/// As text.
pub fn render(problems: &[Problem], _: &[SourceFile], _: bool) -> String {
    let lines = problems
        .iter()
        .map(|problem| format!("{}: {}\n", problem.file, problem.message));
    lines.collect()
}
