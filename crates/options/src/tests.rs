use super::*;
use proptest::prelude::*;

#[derive(Debug, Default, Clone, PartialEq)]
struct Item {
    is_read_only: bool,
    is_direct: bool,
    size: u32,
    names: Vec<String>,
}

const SCHEMA: Schema<Item> = Schema {
    what: "thing",
    required: &[Required { key: "name", about: "Its name" }],
    options: &[
        OptionKind {
            name: "ro",
            key: "read-only",
            set: Set::Flag { set: |item, value| item.is_read_only = value, off: Some("rw") },
            get: |item| item.is_read_only.to_string(),
            default: "false",
            about: "Read-only",
            is_reloaded: true,
        },
        OptionKind {
            name: "mode",
            key: "mode",
            set: Set::Choice(&[
                ("cached", |item| item.is_direct = false),
                ("direct", |item| item.is_direct = true),
                ("none", |item| item.is_direct = false),
            ]),
            get: |item| if item.is_direct { "direct".into() } else { "cached".into() },
            default: "cached",
            about: "`cached`: through a cache; `direct`: past it",
            is_reloaded: false,
        },
        OptionKind {
            name: "size",
            key: "size",
            set: Set::Text {
                value: "N",
                set: |item, value| {
                    item.size = value.parse().map_err(OptionError::other)?;
                    Ok(())
                },
            },
            get: |item| if item.size == 0 { String::new() } else { item.size.to_string() },
            default: "",
            about: "Number of bytes",
            is_reloaded: false,
        },
        OptionKind {
            name: "allow",
            key: "allow",
            set: Set::List {
                value: "NAME",
                separator: '|',
                set: |item, names| {
                    if names.iter().any(|name| name.is_empty()) {
                        return Err(OptionError::invalid("allow", names.join("|"), "names"));
                    }
                    item.names = names.iter().map(ToString::to_string).collect();
                    Ok(())
                },
            },
            get: |item| item.names.join("|"),
            default: "",
            about: "Who may use it",
            is_reloaded: true,
        },
    ],
    hints: &[("readonly", "ro")],
};

fn parse(words: &[&str]) -> Result<Item, OptionError> {
    let mut item = Item::default();
    words.iter().try_for_each(|word| SCHEMA.set_known_word(&mut item, word))?;
    Ok(item)
}

#[test]
fn words_set_options() {
    let item = parse(&["ro", "mode=direct", "size=7", "allow=a|b"]).unwrap();
    let wanted = Item { is_read_only: true, is_direct: true, size: 7, names: vec!["a".into(), "b".into()] };
    assert_eq!(item, wanted);
    assert!(!parse(&["ro", "rw"]).unwrap().is_read_only, "the last word counts");
    for (word, said) in [
        ("mode=fast", "invalid mode 'fast' (expected cached, direct or none)"),
        ("mode", "invalid mode '' (expected cached, direct or none)"),
        ("ro=yes", "invalid ro 'yes' (expected no value)"),
        ("size=much", "invalid digit found in string"),
        ("allow=", "invalid allow '' (expected names)"),
        ("readonly", "'readonly': unknown option of a thing; write ro"),
        (
            "turbo",
            "'turbo': unknown option of a thing; expected ro|rw, mode=cached|direct|none, size=N, allow=NAME[|NAME...]",
        ),
    ] {
        assert_eq!(parse(&[word]).unwrap_err().to_string(), said);
    }
    assert_eq!(SCHEMA.set_word(&mut Item::default(), "rate=5"), Ok(false));
    let long = parse(&[&format!("mode={}", "é".repeat(1000))]).unwrap_err().to_string();
    assert!(long.len() < 300, "{long}");
}

#[test]
fn values_of_a_file_set_options() {
    let mut item = Item::default();
    let mut set = |key: &str, value: Value| SCHEMA.with_key(key).unwrap().set_value(&mut item, &value);
    assert_eq!(set("read-only", Value::Flag(true)), Ok(()));
    assert_eq!(set("mode", Value::Text("direct".into())), Ok(()));
    assert_eq!(set("allow", Value::List(vec!["a|b".into()])), Ok(()));
    let wrong = set("size", Value::Flag(true)).unwrap_err().to_string();
    assert_eq!(wrong, "size is a text or a number");
    assert_eq!((item.is_read_only, item.is_direct, item.names.len()), (true, true, 1), "one name with a | in it");
    assert!(SCHEMA.with_key("ro").is_none());
    assert_eq!(SCHEMA.keys().collect::<Vec<_>>(), ["name", "read-only", "mode", "size", "allow"]);
}

#[test]
fn items_are_compared_by_their_values() {
    let (one, other) = (parse(&["ro", "mode=direct"]).unwrap(), parse(&["size=5"]).unwrap());
    assert_eq!(SCHEMA.changed_for_restart(&one, &other).collect::<Vec<_>>(), ["mode", "size"]);
    assert_eq!(SCHEMA.changed_for_restart(&one, &one).count(), 0);
}

#[test]
fn the_reference_has_all_keys_and_the_help_all_words() {
    let rows = SCHEMA.rows();
    assert_eq!(rows.iter().map(|row| row.key).collect::<Vec<_>>(), SCHEMA.keys().collect::<Vec<_>>());
    assert_eq!((rows[0].value.as_str(), rows[2].default.as_str()), ("text, required", "`cached`"));
    assert_eq!(rows[2].value, "`\"cached\"` or `\"direct\"` or `\"none\"`");
    let help = SCHEMA.help();
    assert!(help.starts_with("  ro|rw\n      Read-only\n  mode=cached|direct|none\n      cached: through"), "{help}");
    assert!(help.contains("past it [default: cached]\n"), "{help}");
    assert!(help.lines().all(|line| line.chars().count() <= 90), "{help}");
}

proptest! {
    /// The words for an item set the same item.
    #[test]
    fn words_come_back(ro: bool, direct: bool, size: u32, names in prop::collection::vec("[a-z=,]{1,8}", 0..4)) {
        let item = Item { is_read_only: ro, is_direct: direct, size, names };
        let words = SCHEMA.words(&item);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        prop_assert_eq!(parse(&words), Ok(item));
    }

    #[test]
    fn any_word_is_an_answer(word in ".{0,40}") {
        let _ = parse(&[&word]);
    }
}
