//! What is wrong, or probably wrong, in a rule file, and how it is shown: with its place, its line, and what to do.

use std::{collections::HashMap, fmt};

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use super::file::SourceFile;

/// Something wrong in a file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// Whether the file is refused for it.
    pub severity: Severity,
    /// The file's name.
    pub file: String,
    /// Counted from 1.
    pub line: usize,
    /// In characters, counted from 1.
    pub column: usize,
    /// Characters from there that it is about; at least 1, and within the line.
    pub length: usize,
    /// Where in the tree: `descriptors[3].rate_limit.unit`; empty for the file as a whole.
    pub path: String,
    /// What is wrong; where the reference refuses the same, its words come first.
    pub message: String,
    /// What was expected, or what to do. May be empty.
    pub help: String,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// No file of the load takes effect.
    Error,
    /// It is read, and probably not what was meant.
    Warning,
}

/// Everything that is wrong with a load, errors first. At least one error.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

/// A stretch of one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub line: usize,
    pub column: usize,
    pub length: usize,
}

/// Longer lines are shown in part, around the place.
const SHOWN_CHARACTERS: usize = 160;

// === impl Problem ===

impl Problem {
    pub(super) fn error(file: &SourceFile, place: Place, message: String) -> Self {
        Self::new(Severity::Error, file, place, message)
    }

    pub(super) fn warning(file: &SourceFile, place: Place, message: String) -> Self {
        Self::new(Severity::Warning, file, place, message)
    }

    fn new(severity: Severity, file: &SourceFile, place: Place, message: String) -> Self {
        Self {
            severity,
            file: file.name.clone(),
            line: place.line,
            column: place.column,
            length: place.length,
            path: String::new(),
            message,
            help: String::new(),
        }
    }

    pub(super) fn path(mut self, path: impl Into<String>) -> Self {
        self.path = path.into();
        self
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = help.into();
        self
    }

    /// The text by which the reference names the same fault: `c.yaml: descriptor has empty key`.
    pub fn reference_text(&self) -> String {
        format!("{}: {}", self.file, self.message)
    }
}

// === impl Place ===

impl Place {
    pub(super) const START: Self = Self {
        line: 1,
        column: 1,
        length: 1,
    };
}

// === impl Problems ===

/// One line per error, for where there is no room for more.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errors = self
            .0
            .iter()
            .filter(|problem| problem.severity == Severity::Error);
        for (at, problem) in errors.enumerate() {
            let Problem {
                file,
                line,
                column,
                message,
                ..
            } = problem;
            let between = if at > 0 { "\n" } else { "" };
            write!(f, "{between}{file}:{line}:{column}: {message}")?;
        }
        Ok(())
    }
}

/// All problems with their lines, as a person wants to see them.
pub fn render(problems: &[Problem], files: &[SourceFile], color: bool) -> String {
    let renderer = if color {
        Renderer::styled()
    } else {
        Renderer::plain()
    };
    let mut lines: HashMap<&str, Vec<&str>> = HashMap::new();
    for file in files {
        lines.insert(&file.name, file.body().lines().collect());
    }
    let mut text = String::new();
    for problem in problems {
        let at = problem.line.saturating_sub(1);
        let line = lines
            .get(problem.file.as_str())
            .and_then(|lines| lines.get(at));
        text += &renderer.render(&[group(problem, line.copied().unwrap_or(""))]);
        text += "\n\n";
    }
    text
}

fn group<'a>(problem: &'a Problem, line: &str) -> Group<'a> {
    let level = match problem.severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
    };
    let path = if problem.path.is_empty() {
        String::new()
    } else {
        format!("{}: ", problem.path)
    };
    let title = format!("{path}{}", problem.message);
    let (line, start) = window(line, problem.column.saturating_sub(1));
    let end = start + problem.length.max(1);
    let byte = |character: usize| {
        line.char_indices()
            .nth(character)
            .map_or(line.len(), |(at, _)| at)
    };
    let span = byte(start)..byte(end);
    let snippet = Snippet::source(line)
        .line_start(problem.line)
        .path(problem.file.as_str())
        .annotation(
            AnnotationKind::Primary
                .span(span)
                .label(problem.help.as_str()),
        );
    level.primary_title(title).element(snippet)
}

/// The part of a long line that is around `column`, and the column in it.
fn window(line: &str, column: usize) -> (String, usize) {
    let length = line.chars().count();
    if length <= SHOWN_CHARACTERS {
        return (line.to_owned(), column);
    }
    let from = column.saturating_sub(SHOWN_CHARACTERS / 2);
    let part: String = line.chars().skip(from).take(SHOWN_CHARACTERS).collect();
    (part, column - from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_shown_with_its_line_and_what_to_do() {
        let text = "domain: d\ndescriptors:\n- {key: ü, rate_limit: {unit: fortnight}}\n";
        let file = SourceFile {
            name: "c.yaml".into(),
            text: text.into(),
        };
        let place = Place {
            line: 3,
            column: 31,
            length: 9,
        };
        let problem = Problem::error(&file, place, "invalid rate limit unit 'fortnight'".into())
            .path("descriptors[0].rate_limit.unit")
            .help("one of second, minute, hour");
        assert_eq!(
            problem.reference_text(),
            "c.yaml: invalid rate limit unit 'fortnight'"
        );
        let shown = render(&[problem], &[file], false);
        assert!(
            shown.starts_with(
                "error: descriptors[0].rate_limit.unit: invalid rate limit unit 'fortnight'"
            ),
            "{shown}"
        );
        assert!(shown.contains("c.yaml:3:31"), "{shown}");
        assert!(
            shown.contains("^^^^^^^^^ one of second, minute, hour"),
            "{shown}"
        );
    }

    #[test]
    fn long_lines_and_places_outside_are_no_panic() {
        let file = SourceFile {
            name: "c.yaml".into(),
            text: format!("{}ü", "x".repeat(10_000)),
        };
        for (line, column, length) in [(1, 10_001, 50), (1, 99_999, 1), (7, 3, 3), (0, 0, 0)] {
            let problem = Problem::warning(
                &file,
                Place {
                    line,
                    column,
                    length,
                },
                "m".into(),
            );
            let shown = render(&[problem], std::slice::from_ref(&file), false);
            assert!(
                shown.starts_with("warning: m") && shown.len() < 2_000,
                "{shown}"
            );
        }
    }
}
